"""Deadlock check: simulates a plan on the main and reduction threads of all ranks, without computing. Pure.

The main thread of a rank waits for messages, for working copies that other pipeline ranks gather with it, and for a
gradient buffer. The reduction thread finishes reductions, which frees the buffer, and waits for the other ranks in sums
and agreements. Exchanges of tokens and sums of choices need no check: a rank waits in them only for ranks of its own
pipeline rank, which have the same plan and so reach the same record.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from pseudoreal_trainer.plan.effects import Effects, Resource, effects_of
from pseudoreal_trainer.plan.expert_parallel import units_read
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.orders import gradient_buffers
from pseudoreal_trainer.plan.records import (
    Fetch,
    Flow,
    Measure,
    Plan,
    Record,
    Send,
)

_Message = tuple[Flow | Literal["layer", "gather"], int, int]
"""Event in a main thread for which other ranks wait: a message (flow, position, micro-batch); the measured gradient of
a layer, for the next layer below that shares units ("layer", position, 0); or the gather of a unit ("gather", unit,
rank)."""


@dataclass
class _Rank:
    """State of a rank in the simulation: the records that its two threads have not yet executed, and its gradient
    buffers."""

    main: deque[Record]
    """Records for the main thread, in plan order."""
    buffers: dict[int, int]
    """Unit -> number of its gradient buffer; units that have a whole gradient of their own are absent."""
    taken: set[int] = field(default_factory=set)
    """Gradient buffers that are not free."""
    reduction: deque[Record] = field(default_factory=deque)
    """Records that the main thread has handed to the reduction thread."""
    accumulating: set[int] = field(default_factory=set)
    """Units that have a gradient buffer."""


def find_deadlock(layout: Layout, plan: Plan) -> dict[int, Record]:
    """Return rank -> record in which the rank waits forever; empty if the plan ends."""
    ranks = [_Rank(deque(records), _buffer_numbers(layout, rank)) for rank, records in enumerate(plan)]
    sent: set[_Message] = set()
    while any([*_advance_main_threads(layout, ranks, sent), _advance_reduction_threads(layout, ranks)]):
        pass
    waiting = {rank: [*state.main, *state.reduction] for rank, state in enumerate(ranks)}
    return {rank: records[0] for rank, records in waiting.items() if records}


def _buffer_numbers(layout: Layout, rank: int) -> dict[int, int]:
    return {unit: number for number, units in enumerate(gradient_buffers(layout, rank)) for unit in units}


def _advance_main_threads(layout: Layout, ranks: list[_Rank], sent: set[_Message]) -> Iterable[bool]:
    """Advance each main thread as far as possible. Yield for each rank whether it advanced."""
    for rank, state in enumerate(ranks):
        before = len(state.main)
        while state.main and _try_start(layout, state, sent):
            record = state.main.popleft()
            if isinstance(record, Send):
                sent.add((record.flow, record.position, record.micro_batch))
            elif isinstance(record, Measure):
                sent.add(("layer", record.position, 0))
            elif isinstance(record, Fetch):
                sent.add(("gather", record.unit, rank))
            if Resource.REDUCTION in effects_of(layout, record).resources:
                state.reduction.append(record)
        yield len(state.main) < before


def _try_start(layout: Layout, state: _Rank, sent: set[_Message]) -> bool:
    """Return whether the main thread can start its next record; if so, take the gradient buffers for the record."""
    record = state.main[0]
    effects = effects_of(layout, record)
    if not _awaited(layout, record, effects) <= sent:
        return False
    units = [unit for unit in effects.accumulates if unit not in state.accumulating]
    buffers = [state.buffers[unit] for unit in units]
    if not state.taken.isdisjoint(buffers):
        return False
    state.taken.update(buffers)
    state.accumulating.update(units)
    return True


def _awaited(layout: Layout, record: Record, effects: Effects) -> set[_Message]:
    common = filter(layout.is_common, units_read(layout, record))
    awaited: set[_Message] = {("gather", unit, user) for unit in common for user in layout.users[unit]}
    if (message := effects.message) is not None:
        awaited.add((message.flow, message.position, message.micro_batch))
    if isinstance(record, Measure) and (above := layout.position_above(record.position)) is not None:
        awaited.add(("layer", above, 0))
    return awaited


def _advance_reduction_threads(layout: Layout, ranks: list[_Rank]) -> bool:
    """Advance the reduction threads as far as possible. Return whether one of them advanced."""
    before = sum(len(state.reduction) for state in ranks)
    for state in ranks:
        while state.reduction and not effects_of(layout, state.reduction[0]).partners:
            _finish(layout, state, state.reduction.popleft())
    for state in ranks:
        if state.reduction and (partners := effects_of(layout, state.reduction[0]).partners):
            _finish_together(layout, [ranks[rank] for rank in partners], state.reduction[0])
    return sum(len(state.reduction) for state in ranks) < before


def _finish(layout: Layout, state: _Rank, record: Record) -> None:
    for unit in state.accumulating.intersection(effects_of(layout, record).frees):
        state.accumulating.remove(unit)
        state.taken.remove(state.buffers[unit])


def _finish_together(layout: Layout, ranks: list[_Rank], joint: Record) -> None:
    """Advance ranks past a record that they execute together, once all of them have reached it."""
    if all(state.reduction and state.reduction[0] == joint for state in ranks):
        for state in ranks:
            _finish(layout, state, state.reduction.popleft())
