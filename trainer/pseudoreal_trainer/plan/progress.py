"""Whether a plan ends: runs it without work, on both threads of all ranks. Pure.

The first thread of a rank waits for messages, and for room in which a gradient grows; the second finishes reductions,
which gives that room back, and waits for the other ranks where they sum or agree.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from pseudoreal_trainer.plan.buffers import gradient_buffers
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.steps import Agree, Backward, Flow, Forward, Measure, Plan, Reduce, Send, Step, Tie, Update

_Message = tuple[Flow | None, int, int]
"""A flow, a position and a micro-batch. A flow of None is the whole gradient of a layer, for the next layer below with
the same block."""
_Meeting = Tie | Agree


@dataclass
class _Rank:
    first: deque[Step]
    free: int
    """Number of rooms for gradients that are free."""
    second: deque[Step] = field(default_factory=deque)
    growing: set[int] = field(default_factory=set)


def stuck(layout: Layout, plan: Plan) -> dict[int, Step]:
    """Rank -> the record in which it waits for ever; empty for a plan that ends."""
    ranks = [_Rank(deque(steps), gradient_buffers(layout, rank)) for rank, steps in enumerate(plan)]
    sent: set[_Message] = set()
    while any([*_firsts(layout, ranks, sent), _seconds(layout, ranks)]):
        pass
    waiting = {rank: [*state.first, *state.second] for rank, state in enumerate(ranks)}
    return {rank: steps[0] for rank, steps in waiting.items() if steps}


def _firsts(layout: Layout, ranks: list[_Rank], sent: set[_Message]) -> Iterable[bool]:
    """Lets each first thread do what it can: whether it got further, rank by rank."""
    for rank, state in enumerate(ranks):
        before = len(state.first)
        while state.first and _begins(layout, rank, state, sent):
            step = state.first.popleft()
            if isinstance(step, Send):
                sent.add((step.flow, step.position, step.micro_batch))
            elif isinstance(step, Measure):
                sent.add((None, step.position, 0))
            elif isinstance(step, Reduce | Tie | Agree | Update):
                state.second.append(step)
        yield len(state.first) < before


def _begins(layout: Layout, rank: int, state: _Rank, sent: set[_Message]) -> bool:
    """Whether the first thread can do its next record; takes room for a gradient."""
    step = state.first[0]
    if not _awaited(layout, rank, step) <= sent:
        return False
    if not isinstance(step, Backward):
        return True
    unit = layout.unit_of(step.position)
    if not layout.has_gradient_shard(unit) or unit in state.growing:
        return True
    if state.free == 0:
        return False
    state.free -= 1
    state.growing.add(unit)
    return True


def _awaited(layout: Layout, rank: int, step: Step) -> set[_Message]:
    if isinstance(step, Forward) and step.position > 0 and layout.rank_of(step.position - 1) != rank:
        return {(Flow.ACTIVATION, step.position, step.micro_batch)}
    if isinstance(step, Backward) and step.position < layout.head and layout.rank_of(step.position + 1) != rank:
        return {(Flow.GRADIENT, step.position + 1, step.micro_batch)}
    if isinstance(step, Measure) and (above := layout.position_above(step.position)) is not None:
        return {(None, above, 0)}
    return set()


def _seconds(layout: Layout, ranks: list[_Rank]) -> bool:
    """Lets the second threads do what they can: whether one got further."""
    before = sum(len(state.second) for state in ranks)
    for state in ranks:
        while state.second and not isinstance(state.second[0], _Meeting):
            _finish(state, state.second.popleft())
    for state in ranks:
        if state.second and isinstance(meeting := state.second[0], _Meeting):
            _meet(layout, ranks, meeting)
    return sum(len(state.second) for state in ranks) < before


def _finish(state: _Rank, step: Step) -> None:
    if isinstance(step, Reduce) and step.unit in state.growing:
        state.growing.remove(step.unit)
        state.free += 1


def _meet(layout: Layout, ranks: list[_Rank], meeting: _Meeting) -> None:
    """Lets the ranks of a meeting go on, once all of them are there."""
    rows = range(len(ranks)) if isinstance(meeting, Agree) else layout.users[meeting.unit]
    if all(ranks[rank].second and ranks[rank].second[0] == meeting for rank in rows):
        for rank in rows:
            ranks[rank].second.popleft()
