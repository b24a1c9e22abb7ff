"""From a plan to tasks on the lanes of its ranks, and their simulated times. Pure.

A rank's first thread executes the plan and computes; its second thread finishes reductions and updates, in plan order;
copies, collectives and messages have lanes of their own. All data ranks of a pipeline rank do the same, so one of them
is simulated.
"""

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from pseudoreal_trainer.estimate.time.costs import Costs
from pseudoreal_trainer.estimate.time.simulation import Span, Task, simulate
from pseudoreal_trainer.plan.buffers import gradient_buffers
from pseudoreal_trainer.plan.expert_parallel import units_accumulated, units_read
from pseudoreal_trainer.plan.layout import POOLS, Layout, Pool
from pseudoreal_trainer.plan.lower import needed
from pseudoreal_trainer.plan.records import (
    Agree,
    Backward,
    Count,
    Exchange,
    ExpertBackward,
    ExpertForward,
    Fetch,
    Forward,
    Leg,
    Pass,
    Plan,
    Read,
    Receive,
    Recompute,
    Record,
    Reduce,
    Send,
    Stash,
    SumChoices,
    Unstash,
    Update,
)

COMPUTE, SIDE, COPY_IN, COPY_OUT, COLLECTIVE, EXCHANGE, MESSAGE, DISK = (
    "compute",
    "side",
    "copy in",
    "copy out",
    "collective",
    "exchange",
    "message",
    "disk",
)

_TAKEN: dict[type, tuple[Leg, ...]] = {
    ExpertForward: (Leg.DISPATCH,),
    Forward: (Leg.COMBINE,),
    ExpertBackward: (Leg.DISPATCH_AGAIN, Leg.COMBINE_GRADIENT),
    Backward: (Leg.DISPATCH_GRADIENT,),
}
"""Passes -> the exchanges that they wait for, if experts are spread."""


@dataclass(frozen=True)
class Timeline:
    """Times of one of several steps. Tasks started by this step may end in the next."""

    tasks: list[Task]
    spans: list[Span]
    """Span of each task, relative to the step's start."""
    seconds: float
    """Seconds between two moments: all ranks know the loss of the step before, and all ranks know the loss of this
    step."""


def timeline(layout: Layout, plan: Plan, costs: Costs, steps: int = 1) -> Timeline:
    """Return the timeline of the last of `steps` consecutive steps. Raises ValueError if the plan deadlocks."""
    builder = _Builder()
    ranks = [_Rank(builder, layout, rank, costs) for rank in range(len(plan))]
    ends: list[list[int]] = [[]]
    first_of_last = 0
    for number in range(steps):
        first_of_last = len(builder)
        ends.append([rank.step(number, plan[index]) for index, rank in enumerate(ranks)])
    tasks = builder.tasks()
    spans = simulate(tasks, costs.cores)
    begin, end = (max((spans[index].end for index in found), default=0.0) for found in (ends[-2], ends[-1]))
    shifted = [Span(span.begin - begin, span.end - begin) for span in spans]
    shown = [index for index, span in enumerate(shifted) if index >= first_of_last or span.end > 0]
    return Timeline([tasks[i] for i in shown], [shifted[i] for i in shown], end - begin)


class _Builder:
    """Collects tasks. A task may wait for a name that another rank defines only later."""

    def __init__(self) -> None:
        self._drafts: list[tuple[tuple[int, str], float, list[int], Record | None]] = []
        """Drafts of tasks: lane, seconds, dependencies, record."""
        self._named: dict[Hashable, int] = {}
        self._awaited: list[tuple[int, Hashable]] = []

    def __len__(self) -> int:
        return len(self._drafts)

    def add(
        self,
        lane: tuple[int, str],
        seconds: float,
        follows: Iterable[int | None],
        record: Record | None = None,
        *,
        awaits: Iterable[Hashable] = (),
    ) -> int:
        index = len(self._drafts)
        self._drafts.append((lane, seconds, [before for before in follows if before is not None], record))
        self._awaited += [(index, name) for name in awaits]
        return index

    def name(self, name: Hashable, index: int) -> None:
        self._named[name] = index

    def tasks(self) -> list[Task]:
        for index, name in self._awaited:
            self._drafts[index][2].append(self._named[name])
        return [
            Task(lane, seconds, tuple(follows), needs_core=lane[1] != DISK, record=record)
            for lane, seconds, follows, record in self._drafts
        ]


class _Rank:
    def __init__(self, builder: _Builder, layout: Layout, rank: int, costs: Costs) -> None:
        self._builder, self._layout, self._rank, self._costs = builder, layout, rank, costs
        self._number = 0
        self._main: int | None = None
        """The newest task of the first thread."""
        self._updated: dict[int, int] = {}
        self._read: dict[int, int] = {}
        self._fetched: dict[int, int] = {}
        self._unstashed: dict[tuple[int, int], int] = {}
        self._exchanged: dict[Exchange, int] = {}
        self._summed: dict[int, int] = {}
        self._growing: set[int] = set()
        self._taken: Counter[Pool] = Counter()
        self._given_back: dict[Pool, list[int]] = {pool: [] for pool in POOLS}
        self._buffers = {pool: gradient_buffers(layout, rank, pool) for pool in POOLS}
        self._to_finish: list[int] = []

    def step(self, number: int, plan: Iterable[Record]) -> int:
        """Add the tasks of a step; return the task that ends it."""
        self._number, self._to_finish = number, []
        for record in plan:
            self._add(record)
        return self._wait(self._to_finish)

    def _add(self, record: Record) -> None:
        match record:
            case Count():
                self._wait([self._task(EXCHANGE, self._costs.network(record), [self._main], record)])
            case SumChoices(position):
                self._summed[position] = self._task(COLLECTIVE, self._costs.network(record), [self._main], record)
            case Exchange():
                self._exchange(record)
            case _ if isinstance(record, Pass):
                self._compute(record)
            case Read(unit):
                self._read[unit] = self._task(DISK, self._costs.read(record), [self._updated.get(unit)], record)
            case Fetch():
                self._fetch(record)
            case Send():
                self._send(record)
            case Receive():
                self._builder.name(("posted", self._number, *_message(record)), self._here())
            case Stash():
                self._task(self._copies(COPY_OUT), self._costs.copy(record), [self._main], record)
            case Unstash():
                key = (record.position, record.micro_batch)
                self._unstashed[key] = self._task(self._copies(COPY_IN), self._costs.copy(record), [self._main], record)
            case Reduce():
                self._reduce(record)
            case Agree():
                self._to_finish.append(self._agree(record))
            case Update(unit):
                self._updated[unit] = self._task(SIDE, self._costs.update(record), [], record)

    def _task(self, lane: str, seconds: float, follows: Iterable[int | None], record: Record) -> int:
        index = self._builder.add((self._rank, lane), seconds, follows, record)
        if lane == COMPUTE:
            self._main = index
        return index

    def _wait(self, follows: Iterable[int | None]) -> int:
        """Make the first thread wait; return the task with which it continues."""
        self._main = self._builder.add((self._rank, COMPUTE), 0.0, follows)
        return self._main

    def _here(self) -> int:
        return self._wait([]) if self._main is None else self._main

    def _copies(self, lane: str) -> str:
        return lane if self._costs.overlaps else COMPUTE

    def _compute(self, record: Pass) -> None:
        layout, key = self._layout, (record.position, record.micro_batch)
        follows = [self._exchanged.pop(Exchange(leg, *key), None) for leg in _TAKEN.get(type(record), ())]
        if isinstance(record, Recompute | Backward):
            follows.append(self._unstashed.pop(key, None))
        if isinstance(record, Backward):
            follows.append(self._summed.get(record.position))
        for unit in units_read(layout, record):
            kept = self._fetched if layout.moves(unit) or layout.refreshed(unit) else self._updated
            follows.append(kept.get(unit))
        for unit in units_accumulated(layout, record):
            if layout.has_gradient_shard(unit) and unit not in self._growing:
                follows.append(self._take_buffer(unit))
        self._main = self._builder.add(
            (self._rank, COMPUTE), self._costs.compute(record), follows, record, awaits=self._awaited(record)
        )

    def _exchange(self, record: Exchange) -> None:
        """The other ranks of the exchange have the same plan, so they start the exchange at the same time."""
        awaits = self._awaited(record)
        if awaits:
            # The first thread waits for the message, then starts the exchange.
            self._main = self._builder.add((self._rank, COMPUTE), 0.0, [self._main], awaits=awaits)
        self._exchanged[record] = self._task(EXCHANGE, self._costs.network(record), [self._main], record)

    def _awaited(self, record: Record) -> list[Hashable]:
        message = needed(self._layout, record)
        return [] if message is None else [("sent", self._number, *_message(message))]

    def _take_buffer(self, unit: int) -> int | None:
        """Return the reduction that freed the buffer's previous use; None if the buffer is new."""
        self._growing.add(unit)
        pool = self._layout.pool_of(unit)
        before = self._taken[pool] - self._buffers[pool]
        self._taken[pool] += 1
        return self._given_back[pool][before] if before >= 0 else None

    def _fetch(self, record: Fetch) -> None:
        # A fetch starts when its unit is ready, while the first thread continues. For a unit that several pipeline
        # ranks gather together, the first thread continues only once the unit is ready.
        ready = [self._here(), self._updated.get(record.unit), self._read.get(record.unit)]
        if self._layout.is_common(record.unit):
            ready = [self._wait(ready)]
        copied = self._task(self._copies(COPY_IN), self._costs.copy(record), ready, record)
        self._fetched[record.unit] = self._collective(record, copied)

    def _collective(self, record: Fetch | Reduce, follows: int) -> int:
        """Return the task of a gather or a sum. It starts when its predecessor has ended on all pipeline ranks that use
        the unit."""
        if not self._layout.is_common(record.unit):
            return self._task(COLLECTIVE, self._costs.network(record), [follows], record)
        name = ("ready", self._number, record)
        self._builder.name((*name, self._rank), follows)
        awaits = [(*name, user) for user in self._layout.users[record.unit]]
        lane = (self._rank, COLLECTIVE)
        return self._builder.add(lane, self._costs.network(record), [], record, awaits=awaits)

    def _send(self, record: Send) -> None:
        message = (self._number, *_message(record))
        lane = (self._rank, f"{MESSAGE} {record.peer}")
        sent = self._builder.add(lane, self._costs.network(record), [self._main], record, awaits=[("posted", *message)])
        self._builder.name(("sent", *message), sent)
        self._to_finish.append(sent)

    def _reduce(self, record: Reduce) -> None:
        summed = self._collective(record, self._here())
        settled = self._task(SIDE, self._costs.settle(record), [summed], record)
        if record.unit in self._growing:
            self._growing.remove(record.unit)
            self._given_back[self._layout.pool_of(record.unit)].append(settled)

    def _agree(self, record: Agree) -> int:
        """Make the second threads of all pipeline ranks wait for each other."""
        arrived = self._builder.add((self._rank, SIDE), 0.0, [self._main])
        self._builder.name(("arrived", self._number, self._rank), arrived)
        awaited = [("arrived", self._number, rank) for rank in range(self._layout.pipeline)]
        return self._builder.add((self._rank, SIDE), self._costs.network(record), [], record, awaits=awaited)


def _message(record: Send | Receive) -> tuple[Hashable, ...]:
    return (record.flow, record.position, record.micro_batch)
