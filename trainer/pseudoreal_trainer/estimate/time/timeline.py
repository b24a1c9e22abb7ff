"""Estimated timeline of a step: the tasks of a plan on the resources of its ranks, and their simulated times. Pure.

A rank's main thread executes the plan and computes; its reduction and update threads finish reductions and updates, in
plan order; copies, collectives, messages and the disk work beside them. All data ranks of a pipeline rank do the same,
so one of them is simulated. What a record waits for and where it runs is in `plan.effects`.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from pseudoreal_trainer.estimate.time.costs import Costs
from pseudoreal_trainer.estimate.time.simulation import Span, Task, simulate
from pseudoreal_trainer.plan.effects import Effects, Resource, effects_of, result
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.memory.pinned_arena import PENDING_GRADIENTS
from pseudoreal_trainer.plan.orders import gradient_buffers
from pseudoreal_trainer.plan.records import (
    Agree,
    Count,
    Fetch,
    Pass,
    Plan,
    Read,
    Receive,
    Record,
    Send,
    Speculate,
    Update,
)


@dataclass(frozen=True)
class Timeline:
    """Simulated times of one step among several. A task started by this step may end in the next step."""

    tasks: list[Task]
    spans: list[Span]
    """Span of each task, relative to the step's start."""
    seconds: float
    """Seconds from the end of the previous step to the end of this one. A step ends once all ranks know its loss and
    all its messages have arrived."""


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
    """Collects the tasks of all ranks. A task may wait for another rank's task by name, even before that task is
    added."""

    def __init__(self) -> None:
        self._drafts: list[tuple[tuple[int, str], float, list[int], Record | None]] = []
        """Tasks under construction: (stream, seconds, indices of the tasks that must end first, record)."""
        self._named: dict[Hashable, int] = {}
        self._awaited: list[tuple[int, Hashable]] = []
        self._dropped_after: dict[int, int] = {}
        """Speculative update -> agreement of its step."""
        self._done_by: dict[int, int] = {}
        """Update -> speculative update of the same unit in the same step."""

    def __len__(self) -> int:
        return len(self._drafts)

    def add(
        self,
        stream: tuple[int, str],
        seconds: float,
        follows: Iterable[int | None],
        record: Record | None = None,
        *,
        awaits: Iterable[Hashable] = (),
    ) -> int:
        index = len(self._drafts)
        self._drafts.append((stream, seconds, [before for before in follows if before is not None], record))
        self._awaited += [(index, name) for name in awaits]
        return index

    def name(self, name: Hashable, index: int) -> None:
        self._named[name] = index

    def drop_after(self, early: int, agreement: int) -> None:
        """Drop the speculative update `early` if it has not started when the agreement ends."""
        self._dropped_after[early] = agreement

    def complete(self, update: int, early: int) -> None:
        """Let `update` take no time if `early` has updated the unit."""
        self._done_by[update] = early

    def tasks(self) -> list[Task]:
        for index, name in self._awaited:
            self._drafts[index][2].append(self._named[name])
        return [
            Task(
                stream,
                seconds,
                tuple(follows),
                needs_core=stream[1] != Resource.DISK,
                record=record,
                dropped_after=self._dropped_after.get(index),
                done_by=self._done_by.get(index),
            )
            for index, (stream, seconds, follows, record) in enumerate(self._drafts)
        ]


class _Rank:
    """Adds the tasks of one rank, record by record."""

    def __init__(self, builder: _Builder, layout: Layout, rank: int, costs: Costs) -> None:
        self._builder, self._layout, self._rank, self._costs = builder, layout, rank, costs
        self._number = 0
        """Number of the step."""
        self._main: int | None = None
        """The newest task of the main thread."""
        self._done: dict[Record, int] = {}
        """Record, as returned by `result` -> its newest task, in this step or an earlier one."""
        self._accumulating: set[int] = set()
        """Units that have a gradient buffer."""
        self._buffers = {unit: number for number, units in enumerate(gradient_buffers(layout, rank)) for unit in units}
        """Unit -> number of its gradient buffer; units that have a whole gradient of their own are absent."""
        self._freed: dict[int, int] = {}
        """Number of a gradient buffer -> newest task that freed it."""
        self._to_finish: list[int] = []
        """Tasks that must end for the step to end."""
        self._speculated: dict[int, int] = {}
        """Unit -> its speculative update in this step."""
        self._newest_updates: deque[int] = deque(maxlen=PENDING_GRADIENTS)
        """A gradient is kept once the oldest of these updates has freed its memory."""

    def step(self, number: int, plan: Iterable[Record]) -> int:
        """Add the tasks of a step. Return the task with which the step ends."""
        self._number, self._to_finish, self._speculated = number, [], {}
        for record in plan:
            self._add(record, effects_of(self._layout, record))
        return self._wait(self._to_finish)

    def _add(self, record: Record, effects: Effects) -> None:
        if isinstance(record, Receive):
            self._builder.name(("posted", self._number, *_message(record)), self._here())
            return
        if not effects.resources:
            return
        ready = [self._done.get(earlier) for earlier in effects.after]
        awaits = [("sent", self._number, *_message(effects.message))] if effects.message is not None else []
        match record:
            case _ if isinstance(record, Pass):
                ready += [self._take_buffer(unit) for unit in effects.accumulates if unit not in self._accumulating]
                last = self._task(record, Resource.COMPUTE, ready, awaits)
            case Read():
                last = self._task(record, Resource.DISK, ready)
            case Speculate():
                last = self._speculated[record.unit] = self._task(record, Resource.UPDATE, ready)
            case Update():
                last = self._task(record, Resource.UPDATE, ready)
                self._newest_updates.append(last)
                if (early := self._speculated.get(record.unit)) is not None:
                    self._builder.complete(last, early)
            case Send():
                last = self._send(record)
            case Agree():
                # The main thread hands the record over; the reduction threads of all ranks wait for each other.
                arrived = self._builder.add((self._rank, Resource.REDUCTION), 0.0, [self._main])
                last = self._joint_task(record, Resource.REDUCTION, effects, arrived)
                self._to_finish.append(last)
                for early in self._speculated.values():
                    self._builder.drop_after(early, last)
            case _:
                last = self._in_turn(record, effects, ready, awaits)
        if isinstance(record, Count):
            # The main thread waits: the host reads the counts.
            self._wait([last])
        self._done[result(record)] = last
        for unit in self._accumulating.intersection(effects.frees):
            self._accumulating.remove(unit)
            self._freed[self._buffers[unit]] = last

    def _in_turn(
        self, record: Record, effects: Effects, ready: Sequence[int | None], awaits: Sequence[Hashable]
    ) -> int:
        """Add a record's task on each of its resources in turn, while the main thread continues."""
        if awaits:
            # The main thread waits for the message, then starts the exchange. The other ranks of the exchange have the
            # same plan, so they start it at the same time.
            self._wait([self._main], awaits)
        ready = [self._here(), *ready]
        if effects.partners and isinstance(record, Fetch):
            # For a unit that several pipeline ranks gather together, the main thread waits until the unit is ready.
            ready = [self._wait(ready)]
        for resource in effects.resources:
            # The engine waits only before the copy to the home: there, norm and rounding overlap this wait.
            if resource is Resource.REDUCTION and len(self._newest_updates) == PENDING_GRADIENTS:
                ready = [*ready, self._newest_updates[0]]
            if effects.partners and resource is Resource.COLLECTIVE:
                (before,) = ready
                assert before is not None, "a collective of several pipeline ranks follows a task of this rank"
                ready = [self._joint_task(record, resource, effects, before)]
            else:
                ready = [self._task(record, resource, ready)]
        (last,) = ready
        assert last is not None, "each resource has a task"
        return last

    def _task(
        self, record: Record, resource: Resource, follows: Iterable[int | None], awaits: Iterable[Hashable] = ()
    ) -> int:
        seconds = self._costs.seconds(record, resource)
        if resource in (Resource.COPY_IN, Resource.COPY_OUT) and not self._costs.overlaps:
            resource = Resource.COMPUTE
        index = self._builder.add((self._rank, resource), seconds, follows, record, awaits=awaits)
        if resource is Resource.COMPUTE:
            self._main = index
        return index

    def _joint_task(self, record: Record, resource: Resource, effects: Effects, follows: int) -> int:
        """Return the task of a record that its partners execute together. The task starts once all partners have ended
        their preceding tasks."""
        name = ("ready", self._number, record)
        self._builder.name((*name, self._rank), follows)
        awaits = [(*name, partner) for partner in effects.partners]
        seconds = self._costs.seconds(record, resource)
        return self._builder.add((self._rank, resource), seconds, [], record, awaits=awaits)

    def _send(self, record: Send) -> int:
        message, stream = (self._number, *_message(record)), (self._rank, f"{Resource.MESSAGES} {record.peer}")
        seconds = self._costs.seconds(record, Resource.MESSAGES)
        sent = self._builder.add(stream, seconds, [self._main], record, awaits=[("posted", *message)])
        self._builder.name(("sent", *message), sent)
        self._to_finish.append(sent)
        return sent

    def _take_buffer(self, unit: int) -> int | None:
        """Return the task that ended the previous use of the buffer; None if this is the buffer's first use."""
        self._accumulating.add(unit)
        return self._freed.get(self._buffers[unit])

    def _wait(self, follows: Iterable[int | None], awaits: Iterable[Hashable] = ()) -> int:
        """Make the main thread wait; return the task with which it continues."""
        self._main = self._builder.add((self._rank, Resource.COMPUTE), 0.0, follows, awaits=awaits)
        return self._main

    def _here(self) -> int:
        return self._wait([]) if self._main is None else self._main


def _message(record: Send | Receive) -> tuple[Hashable, ...]:
    return (record.flow, record.position, record.micro_batch)
