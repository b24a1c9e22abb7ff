"""Expands the order of passes to the whole plan of a step: messages, working copies, reductions, updates. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from pseudoreal_trainer.plan.effects import awaited_message
from pseudoreal_trainer.plan.expert_parallel import (
    PassPart,
    is_first_reuse_of_input,
    is_first_use_of_input,
    split_passes,
    units_accumulated,
)
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.orders import compute_order, evaluation_order
from pseudoreal_trainer.plan.records import (
    Agree,
    Backward,
    Flow,
    Forward,
    Measure,
    Pass,
    Plan,
    RankPlan,
    Receive,
    Record,
    Reduce,
    Send,
    Speculate,
    Stash,
    SumChoices,
    Unstash,
    Update,
)
from pseudoreal_trainer.plan.window import window_records


def step_plan(layout: Layout) -> Plan:
    """Return the plan of a training step, for each pipeline rank."""
    return _with_messages(layout, [training_order(layout, rank) for rank in range(layout.pipeline)])


def training_order(layout: Layout, rank: int) -> list[PassPart]:
    """Return the passes of a training step, with expert-parallel passes in their parts."""
    return split_passes(layout, compute_order(layout, rank))


def measuring_plan(layout: Layout) -> Plan:
    """Return the plan of a training step that measures the gradients of single layers, for each pipeline rank."""
    return tuple(tuple(_with_measures(layout, records)) for records in step_plan(layout))


def _with_measures(layout: Layout, records: RankPlan) -> Iterator[Record]:
    lasts = {record.position: index for index, record in enumerate(records) if isinstance(record, Backward)}
    for index, record in enumerate(records):
        yield record
        if isinstance(record, Backward) and lasts[record.position] == index and layout.shares(record.position):
            yield Measure(record.position)


def evaluation_plan(layout: Layout) -> Plan:
    """Return the plan of forward passes to the loss, for each pipeline rank."""
    orders = (evaluation_order(layout, rank) for rank in range(layout.pipeline))
    return _with_messages(layout, [split_passes(layout, order) for order in orders])


def _with_messages(layout: Layout, orders: list[list[PassPart]]) -> Plan:
    sent = [[message for compute in order for message in _sends(layout, compute)] for order in orders]
    receives = [_receives(layout, rank, orders[rank], sent) for rank in range(layout.pipeline)]
    return tuple(tuple(_lower_rank(layout, r, orders[r], receives[r])) for r in range(layout.pipeline))


def _lower_rank(
    layout: Layout, rank: int, order: list[PassPart], receives: dict[int, list[Receive]]
) -> Iterator[Record]:
    copies = window_records(layout, order)
    last = {unit: index for index, compute in enumerate(order) for unit in units_accumulated(layout, compute)}
    offloads = _Offloads(layout, order)
    agrees = _early_agreement(layout, order)
    last_choices = _last_choices(layout, order)
    for index, compute in enumerate(order):
        yield from copies.get(index, ())
        yield from receives.get(index, ())
        yield from offloads.before(index)
        yield compute
        yield from _sends(layout, compute)
        yield from offloads.after(index)
        if index in last_choices:
            yield SumChoices(last_choices[index])
        if index == agrees:
            yield Agree()
        for unit in units_accumulated(layout, compute):
            if last[unit] == index and not layout.is_common(unit):
                yield from _reduction(layout, unit)
    yield from copies.get(len(order), ())
    if last:
        yield from _records_at_end(layout, rank)


def _last_choices(layout: Layout, order: Sequence[PassPart]) -> dict[int, int]:
    """Return index into `order` -> position, for the last pass of each position that chooses experts. Empty in an
    evaluation, and if no loss depends on all choices of the step."""
    if not any(isinstance(compute, Backward) for compute in order):
        return {}
    choosing = (
        (i, c) for i, c in enumerate(order) if is_first_use_of_input(c, layout) and layout.sums_choices(c.position)
    )
    return {index: position for position, index in {c.position: i for i, c in choosing}.items()}


def _early_agreement(layout: Layout, order: Sequence[PassPart]) -> int | None:
    """Return the index into `order` of the pass after which a rank takes part in the early agreement on the loss; None
    if the ranks agree at the end of the step, or in an evaluation.

    On the head's rank this is the last pass of the head; on other ranks, the first pass of the step. Each rank agrees
    as early as possible: until all ranks have agreed, no rank updates units or frees gradient buffers.
    """
    if layout.clipping == "Global" or not any(isinstance(compute, Backward) for compute in order):
        return None
    head = [i for i, c in enumerate(order) if isinstance(c, Backward) and c.position == layout.head]
    return max(head, default=0)


def _reduction(layout: Layout, unit: int) -> Iterator[Record]:
    """Yield the reduction of a unit and its update; with global clipping, only an update that may be undone."""
    yield Reduce(unit)
    if not layout.keeps_gradients:
        yield Update(unit)
    elif layout.is_speculative(unit):
        yield Speculate(unit)


def _records_at_end(layout: Layout, rank: int) -> Iterator[Record]:
    # In one order on all ranks, because the backward passes of the ranks may end in different orders.
    common = layout.common_units(rank)
    for unit in common:
        yield from _reduction(layout, unit)
    if layout.keeps_gradients:
        yield Agree()
        # In the order in which the next step needs the units.
        yield from map(Update, dict.fromkeys([*common, *layout.local_units(rank)]))


def _sends(layout: Layout, compute: PassPart) -> list[Send]:
    match compute:
        case Forward(position, m):
            if position == layout.head or layout.rank_of(position + 1) == layout.rank_of(position):
                return []
            return [Send(Flow.ACTIVATION, position + 1, m, layout.rank_of(position + 1))]
        case Backward(position, m):
            if position == 0 or layout.rank_of(position - 1) == layout.rank_of(position):
                return []
            return [Send(Flow.GRADIENT, position, m, layout.rank_of(position - 1))]
    return []


def _receives(layout: Layout, rank: int, order: Sequence[PassPart], sent: list[list[Send]]) -> dict[int, list[Receive]]:
    """Return index into `order` -> receives that start before this pass.

    Receives start one pass before the pass that uses them, so that messages travel while the rank computes. A channel
    is a flow from one rank to another; the receives of each channel are in the order of its sends.
    """
    channels = _incoming(rank, sent)
    ordinals = {message: index for messages in channels.values() for index, message in enumerate(messages)}
    started: Counter[tuple[Flow, int]] = Counter()
    placed: dict[int, list[Receive]] = {}
    ahead = 0
    for index, record in enumerate(order):
        if (need := awaited_message(layout, record)) is not None:
            channel, until = (need.flow, need.peer), ordinals[need] + 1
            placed.setdefault(ahead, []).extend(channels[channel][started[channel] : until])
            started[channel] = max(started[channel], until)
        if isinstance(record, Pass):
            ahead = index
    return placed


def _incoming(rank: int, sent: list[list[Send]]) -> dict[tuple[Flow, int], list[Receive]]:
    """Return the messages that a rank receives on each channel, in the order of the sends."""
    channels: dict[tuple[Flow, int], list[Receive]] = {}
    for peer, messages in enumerate(sent):
        for message in messages:
            if message.peer == rank:
                receive = Receive(message.flow, message.position, message.micro_batch, peer)
                channels.setdefault((message.flow, peer), []).append(receive)
    return channels


class _Offloads:
    """Records of activation offload: an input is offloaded right after its forward pass, and reloaded one pass ahead of
    its use."""

    def __init__(self, layout: Layout, order: Sequence[PassPart]) -> None:
        self._before: dict[int, list[Record]] = {}
        self._after: dict[int, list[Record]] = {}
        if not layout.stash or not any(isinstance(c, Backward) for c in order):
            return
        for index, (ahead, record) in enumerate(pairwise([order[0], *order])):
            if is_first_use_of_input(record, layout) and record.position > 0:
                self._after[index] = [Stash(record.position, record.micro_batch)]
            elif is_first_reuse_of_input(record, layout) and 0 < record.position < layout.head:
                before = index if is_first_use_of_input(ahead, layout) else index - 1
                self._before.setdefault(before, []).append(Unstash(record.position, record.micro_batch))

    def before(self, index: int) -> list[Record]:
        return self._before.get(index, [])

    def after(self, index: int) -> list[Record]:
        return self._after.get(index, [])
