"""Proves a step plan before the first batch: it ends, stays within the window, and omits and repeats nothing. Pure."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations, zip_longest
from typing import Any

from pseudoreal_trainer.plan.expert_parallel import units_accumulated, units_read
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.progress import find_deadlock
from pseudoreal_trainer.plan.records import (
    Agree,
    Backward,
    Count,
    Drop,
    Exchange,
    ExpertBackward,
    ExpertForward,
    Fetch,
    Flow,
    Forward,
    Leg,
    Measure,
    Pass,
    Plan,
    RankPlan,
    Read,
    Receive,
    Recompute,
    Record,
    Reduce,
    Route,
    Send,
    Speculate,
    Stash,
    SumChoices,
    Unstash,
    Update,
)

_MOST_FETCHES = 2
"""Maximum number of fetches of a group of experts for the tokens of one position: one forward, one backward."""


class PlanError(RuntimeError):
    """Raised for a step plan that must not run. The text names the rank, the record of its plan and the fault."""


def check_plan(layout: Layout, plan: Plan) -> None:
    """Raise PlanError unless the plan trains one step of the layout, on all ranks together."""
    for rank, records in enumerate(plan):
        _check_rank(layout, rank, records)
    _check_channels(plan)
    _check_collectives(layout, plan)
    _check_that_it_ends(layout, plan)


def _check_rank(layout: Layout, rank: int, records: RankPlan) -> None:
    state = _RankState(layout, rank)
    for index, record in enumerate(records):
        try:
            _HANDLERS[type(record)](state, record)
        except PlanError as error:
            raise PlanError(f"rank {rank}, record {index} ({record}): {error}") from None
    try:
        state.finish()
    except PlanError as error:
        raise PlanError(f"rank {rank}, at the end: {error}") from None


def _require(holds: bool, fault: str) -> None:
    if not holds:
        raise PlanError(fault)


@dataclass
class _RankState:
    """State of a rank between two records of its plan. Each method checks one kind of record against the state, then
    applies the record. Methods raise PlanError for a fault."""

    layout: Layout
    rank: int
    resident: dict[int, Fetch] = field(default_factory=dict)
    """Unit with a working copy -> its Fetch."""
    fetches: Counter[Fetch] = field(default_factory=Counter)
    read: dict[int, Read] = field(default_factory=dict)
    """Unit with weights in a read-ahead buffer, or on the way there -> its Read."""
    inputs: set[tuple[int, int]] = field(default_factory=set)
    """Pairs (position, micro-batch) with the input on the device."""
    stashed: set[tuple[int, int]] = field(default_factory=set)
    gradients: set[tuple[int, int]] = field(default_factory=set)
    """Pairs (position, micro-batch) with the gradient of the input on the device."""
    passes: Counter[Pass] = field(default_factory=Counter)
    counted: set[tuple[int, int]] = field(default_factory=set)
    """Pairs (position, micro-batch) with exchanged row counts."""
    summed: set[int] = field(default_factory=set)
    """Positions with the choices of each expert summed over the whole step."""
    exchanges: Counter[Exchange] = field(default_factory=Counter)
    measured: list[int] = field(default_factory=list)
    """Positions that were measured."""
    reduced: set[int] = field(default_factory=set)
    speculated: set[int] = field(default_factory=set)
    updated: set[int] = field(default_factory=set)
    agreed: bool = False

    def read_ahead(self, record: Read) -> None:
        _require(self.layout.home(record.unit) == "Disk", "its home is not Disk")
        _require(record.unit not in self.read, "it is read ahead already")
        self._require_wanted(record)
        self.read[record.unit] = record

    def fetch(self, record: Fetch) -> None:
        unit = record.unit
        _require(unit not in self.resident, "its working copy exists already")
        _require(self.layout.moves(unit) or self.layout.refreshed(unit), "its working copy always exists")
        _require(self.layout.home(unit) != "Disk" or unit in self.read, "its weights were not read from disk")
        self._require_not_updated(unit, "its update has started")
        self._require_wanted(record)
        if (read := self.read.pop(unit, None)) is not None:
            _require(read.wanted_by == record.wanted_by, f"its weights were read for position {read.wanted_by}")
        self.fetches[record] += 1
        too_often = record.wanted_by is not None and self.fetches[record] > _MOST_FETCHES
        _require(not too_often, "it is fetched a third time for one position")
        self.resident[unit] = record
        pool, window = self.layout.pool_of(unit), self.layout.window
        moving = sum(self.layout.moves(u) and self.layout.pool_of(u) == pool for u in self.resident)
        _require(moving <= window, f"{moving} working copies exceed the window of {window}")

    def drop(self, record: Drop) -> None:
        _require(record.unit in self.resident, "it has no working copy")
        _require(self.layout.moves(record.unit), "its working copy must stay")
        del self.resident[record.unit]

    def _require_wanted(self, record: Read | Fetch) -> None:
        """Check that the record has `wanted_by` if and only if the unit is an optional group of experts, and that the
        row counts of this position are known."""
        position, is_optional = record.wanted_by, self.layout.is_optional(record.unit)
        if position is None:
            _require(not is_optional, "it is fetched whether tokens came for it or not")
            return
        _require(is_optional, "it is needed whether tokens came or not")
        _require(record.unit in self.layout.units_of(position), f"position {position} does not use it")
        everything = {(position, m) for m in range(self.layout.micro_batches)}
        _require(everything <= self.counted, "nobody knows yet whether tokens came for it")

    def forward(self, record: Forward) -> None:
        position, m = record.position, record.micro_batch
        self._compute(record)
        if self.layout.spreads(position):
            self._require_exchange(Leg.COMBINE, position, m)
        else:
            self._require_input(position, m)
        self._produce_input(position + 1, m)

    def backward(self, record: Backward) -> None:
        position, m = record.position, record.micro_batch
        self._compute(record)
        summed = position in self.summed or not self.layout.sums_choices(position)
        _require(summed, "the choices of its experts in the whole step are not known yet")
        if self.layout.spreads(position):
            self._require_exchange(Leg.DISPATCH_GRADIENT, position, m)
        if position == self.layout.head:
            _require((position, m) in self.inputs, "its input is not here")
        else:
            _require(self.passes[Forward(position, m)] == 1, "its forward pass has not been")
            _require(position == 0 or (position, m) in self.inputs, "its input is not here")
            _require((position + 1, m) in self.gradients, "the gradient of its output is not here")
            self.gradients.remove((position + 1, m))
        self.inputs.discard((position, m))
        if position > 0:
            self._produce_gradient(position, m)

    def route(self, record: Route) -> None:
        self._compute(record)
        self._require_spread(record)
        self._require_input(record.position, record.micro_batch)

    def count(self, record: Count) -> None:
        self._require_spread(record)
        for m in range(record.first, record.first + record.micro_batches):
            key = (record.position, m)
            _require(self.passes[Route(*key)] == 1, f"no experts are chosen for micro-batch {m}")
            _require(key not in self.counted, f"the tokens of micro-batch {m} are counted already")
            self.counted.add(key)

    def sum_choices(self, record: SumChoices) -> None:
        position = record.position
        _require(self.layout.sums_choices(position), "no loss depends on the choices of its experts")
        _require(position not in self.summed, "they are summed already")
        kind = Route if self.layout.spreads(position) else Forward
        for m in range(self.layout.micro_batches):
            _require(self.passes[kind(position, m)] == 1, f"no experts are chosen for micro-batch {m}")
        self.summed.add(position)

    def exchange(self, record: Exchange) -> None:
        self._require_spread(record)
        key = (record.position, record.micro_batch)
        self.exchanges[record] += 1
        _require(self.exchanges[record] == 1, "it has been already")
        match record.leg:
            case Leg.DISPATCH:
                _require(key in self.counted, "nobody knows how many tokens go where")
            case Leg.COMBINE:
                self._require_groups(ExpertForward, key, "its experts have not computed")
            case Leg.DISPATCH_AGAIN:
                self._require_pass(Recompute(*key), "its tokens are not here any more")
            case Leg.COMBINE_GRADIENT:
                _require((key[0] + 1, key[1]) in self.gradients, "the gradient of its output is not here")
                if self.layout.recompute:
                    self._require_pass(Recompute(*key), "the weights of its tokens are not here any more")
            case Leg.DISPATCH_GRADIENT:
                self._require_groups(ExpertBackward, key, "its experts have no gradients of tokens yet")

    def expert_forward(self, record: ExpertForward) -> None:
        self._compute(record)
        self._require_exchange(Leg.DISPATCH, record.position, record.micro_batch)

    def recompute(self, record: Recompute) -> None:
        position, m = record.position, record.micro_batch
        self._compute(record)
        _require(self.layout.recompute, "its graph was kept")
        self._require_pass(Forward(position, m), "its forward pass has not been")
        self._require_input(position, m)

    def expert_backward(self, record: ExpertBackward) -> None:
        self._compute(record)
        self._require_exchange(Leg.COMBINE_GRADIENT, record.position, record.micro_batch)
        if self.layout.recompute:
            self._require_exchange(Leg.DISPATCH_AGAIN, record.position, record.micro_batch)

    def _require_pass(self, record: Pass, fault: str) -> None:
        _require(self.passes[record] == 1, fault)

    def _require_groups(self, kind: type[ExpertForward | ExpertBackward], key: tuple[int, int], fault: str) -> None:
        for group in range(self.layout.expert_groups):
            self._require_pass(kind(*key, group), fault)

    def _require_exchange(self, leg: Leg, position: int, micro_batch: int) -> None:
        _require(self.exchanges[Exchange(leg, position, micro_batch)] == 1, f"the exchange {leg.value} has not begun")

    def _require_input(self, position: int, micro_batch: int) -> None:
        _require(position == 0 or (position, micro_batch) in self.inputs, "its input is not here")

    def _require_spread(self, record: Route | Count | Exchange) -> None:
        _require(self.layout.spreads(record.position), "its position has no experts on other ranks")

    def _compute(self, record: Pass) -> None:
        layout = self.layout
        _require(layout.rank_of(record.position) == self.rank, "its position is on another rank")
        _require(record.micro_batch < layout.micro_batches, "there is no such micro-batch")
        for unit in units_read(layout, record):
            self._require_not_updated(unit, "its unit's update has started")
            needs_copy = layout.moves(unit) or layout.refreshed(unit)
            _require(not needs_copy or unit in self.resident, "its unit has no working copy")
            wanted_by = self.resident[unit].wanted_by if unit in self.resident else None
            is_wanted_here = wanted_by in (None, record.position)
            _require(is_wanted_here, f"its unit was fetched for the tokens of position {wanted_by}")
        _require(self.reduced.isdisjoint(units_accumulated(layout, record)), "its unit's gradient is reduced already")
        self.passes[record] += 1
        _require(self.passes[record] == 1, "it has been already")

    def _produce_input(self, position: int, micro_batch: int) -> None:
        if self.layout.rank_of(position) == self.rank:
            self.inputs.add((position, micro_batch))

    def _produce_gradient(self, position: int, micro_batch: int) -> None:
        if self.layout.rank_of(position - 1) == self.rank:
            self.gradients.add((position, micro_batch))

    def send(self, record: Send) -> None:
        position, m = record.position, record.micro_batch
        source = Forward(position - 1, m) if record.flow is Flow.ACTIVATION else Backward(position, m)
        target = position if record.flow is Flow.ACTIVATION else position - 1
        _require(self.passes[source] == 1, "what it sends does not exist yet")
        _require(self.layout.rank_of(target) == record.peer != self.rank, f"rank {record.peer} does not need it")

    def receive(self, record: Receive) -> None:
        key, here = (record.position, record.micro_batch), self.inputs
        if record.flow is Flow.GRADIENT:
            here = self.gradients
        _require(key not in here, "it is here already")
        here.add(key)

    def stash(self, record: Stash) -> None:
        key = (record.position, record.micro_batch)
        first = Route(*key) if self.layout.spreads(record.position) else Forward(*key)
        self._require_pass(first, "its forward pass has not been")
        _require(key in self.inputs, "its input is not here")
        self.inputs.remove(key)
        self.stashed.add(key)

    def unstash(self, record: Unstash) -> None:
        key = (record.position, record.micro_batch)
        _require(key in self.stashed, "its input is not on the host")
        self.stashed.remove(key)
        self.inputs.add(key)

    def measure(self, record: Measure) -> None:
        position = record.position
        _require(self.layout.shares(position), "no other layer uses its units")
        passes = [Backward(position, m) for m in range(self.layout.micro_batches)]
        _require(all(self.passes[p] == 1 for p in passes), "its gradient is not complete")
        # Neighbouring layers on two ranks exchange gradients: all ranks measure from the last position to the first.
        _require(
            not self.measured or position < self.measured[-1], f"position {self.measured[-1:]} was measured before"
        )
        self.measured.append(position)

    def reduce(self, record: Reduce) -> None:
        _require(record.unit not in self.reduced, "it is reduced already")
        for expected in self._backward_passes(record.unit):
            _require(self.passes[expected] == 1, f"its gradient lacks {expected}")
        self.reduced.add(record.unit)

    def speculate(self, record: Speculate) -> None:
        unit = record.unit
        _require(self.layout.is_speculative(unit), "its update must not start before the norm is known")
        _require(unit in self.reduced, "its gradient is not reduced")
        _require(not self.agreed, "the norm is known already")
        _require(unit not in self.speculated, "its update has started")
        self.speculated.add(unit)

    def agree(self, _: Agree) -> None:
        _require(not self.agreed, "all ranks agree only once")
        if self.layout.clipping == "Global":
            self._require_all("reduced", self.reduced)
        if self.layout.rank_of(self.layout.head) == self.rank:
            losses = [Backward(self.layout.head, m) for m in range(self.layout.micro_batches)]
            _require(all(self.passes[p] == 1 for p in losses), "the loss is not known yet")
        self.agreed = True

    def update(self, record: Update) -> None:
        unit = record.unit
        _require(unit in self.reduced, "its gradient is not reduced")
        _require(self.agreed, "not all ranks have agreed that the loss is finite")
        _require(unit not in self.updated, "it is updated already")
        self.updated.add(unit)

    def _require_not_updated(self, unit: int, fault: str) -> None:
        _require(unit not in self.updated and unit not in self.speculated, fault)

    def finish(self) -> None:
        layout = self.layout
        self._require_all("reduced", self.reduced)
        self._require_all("updated", self.updated)
        _require(self.agreed, "the ranks never agree on the loss")
        moving = [unit for unit in self.resident if layout.moves(unit)]
        _require(not moving, f"the working copies of units {moving} are never dropped")
        _require(not self.stashed and not self.gradients and not self.inputs, "activations or gradients are left over")
        shared = [position for position in reversed(layout.positions(self.rank)) if layout.shares(position)]
        _require(self.measured in ([], shared), "some layers are measured and others are not")

    def _require_all(self, what: str, units: set[int]) -> None:
        missing = sorted(set(self.layout.local_units(self.rank)) - units)
        _require(not missing, f"units {missing} are not {what}")

    def _backward_passes(self, unit: int) -> list[Pass]:
        """Return the passes that add to the gradient of a unit."""
        layout = self.layout
        positions = [p for p in layout.positions(self.rank) if unit in layout.units_of(p)]
        return [self._backward_pass(unit, p, m) for p in positions for m in range(layout.micro_batches)]

    def _backward_pass(self, unit: int, position: int, micro_batch: int) -> Pass:
        if self.layout.pool_of(unit) == "Experts" and self.layout.spreads(position):
            return ExpertBackward(position, micro_batch, self.layout.group_of(unit))
        return Backward(position, micro_batch)


_HANDLERS: dict[type, Callable[[_RankState, Any], None]] = {
    Read: _RankState.read_ahead,
    Fetch: _RankState.fetch,
    Drop: _RankState.drop,
    Forward: _RankState.forward,
    Backward: _RankState.backward,
    Route: _RankState.route,
    Count: _RankState.count,
    SumChoices: _RankState.sum_choices,
    Exchange: _RankState.exchange,
    ExpertForward: _RankState.expert_forward,
    Recompute: _RankState.recompute,
    ExpertBackward: _RankState.expert_backward,
    Send: _RankState.send,
    Receive: _RankState.receive,
    Stash: _RankState.stash,
    Unstash: _RankState.unstash,
    Measure: _RankState.measure,
    Reduce: _RankState.reduce,
    Speculate: _RankState.speculate,
    Agree: _RankState.agree,
    Update: _RankState.update,
}

_Channel = tuple[Flow, int, int]
"""Flow, sending rank and receiving rank."""


def _check_channels(plan: Plan) -> None:
    """Check that the k-th receive of a channel gets the channel's k-th send: on some networks messages have no tags.
    Raises PlanError."""
    sent: dict[_Channel, list[tuple[int, int]]] = {}
    received: dict[_Channel, list[tuple[int, int]]] = {}
    for rank, records in enumerate(plan):
        for record in records:
            if isinstance(record, Send):
                sent.setdefault((record.flow, rank, record.peer), []).append((record.position, record.micro_batch))
            elif isinstance(record, Receive):
                received.setdefault((record.flow, record.peer, rank), []).append((record.position, record.micro_batch))
    for channel in sorted(sent.keys() | received.keys(), key=str):
        flow, source, target = channel
        _require(
            sent.get(channel) == received.get(channel),
            f"rank {target} does not receive the {flow.value}s from rank {source} in the order in which they are sent",
        )


def _check_collectives(layout: Layout, plan: Plan) -> None:
    """Check that pipeline ranks launch their common collectives in one order. Raises PlanError.

    For each pair of ranks, both plans must contain the same sequence of common collectives. The data ranks of one
    pipeline rank have the same plan, so their collectives need no check.
    """
    for first, second in combinations(range(layout.pipeline), 2):
        words = [_word(layout, {first, second}, plan[rank]) for rank in (first, second)]
        for here, there in zip_longest(*words):
            _require(
                here == there,
                f"rank {first} begins {here} where rank {second} begins {there}, and both have a part in each",
            )


def _word(layout: Layout, pair: set[int], records: RankPlan) -> list[Record]:
    """Return the collectives of a rank's plan in which both ranks of the pair take part, in plan order."""
    return [r for r in records if isinstance(r, Fetch | Reduce) and pair <= set(layout.users[r.unit])]


def _check_that_it_ends(layout: Layout, plan: Plan) -> None:
    waiting = find_deadlock(layout, plan)
    _require(not waiting, f"it never ends: {'; '.join(f'rank {r} waits in {record}' for r, record in waiting.items())}")
