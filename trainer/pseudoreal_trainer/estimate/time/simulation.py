"""Discrete-event simulation of tasks that run on streams, depend on each other and share CPU cores. Pure."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from pseudoreal_trainer.plan.records import Record


@dataclass(frozen=True, slots=True)
class Task:
    """A task. It starts when its predecessor on the stream and all tasks in `follows` have ended."""

    stream: tuple[int, str]
    """(rank, name of the stream). A stream runs one task at a time, in the order of the tasks given to `simulate`."""
    seconds: float
    follows: tuple[int, ...]
    """Indices of the tasks that must end first."""
    needs_core: bool
    record: Record | None = None
    """The plan's record executed by the task."""
    dropped_after: int | None = None
    """Index of the task that drops this one: if this one starts after the end of that task, it takes no time."""
    done_by: int | None = None
    """Index of an earlier task that may do the work of this one: if that task has taken time, this one takes none."""


@dataclass(frozen=True, slots=True)
class Span:
    """Start and end of a task, in the unit of time of the costs: seconds, or forward passes of a layer."""

    begin: float
    end: float


def simulate(tasks: Sequence[Task], cores: float | None) -> list[Span]:
    """Return the span of each task. Running tasks that need a core share `cores` evenly, at most one core per task;
    None: enough cores for all. Raises ValueError if some task never starts."""
    return _Simulation(tasks, cores).run()


class _Simulation:
    """State of a simulation. All tasks that share cores advance at the same pace, so the order of their ends follows
    from one shared clock with this pace."""

    def __init__(self, tasks: Sequence[Task], cores: float | None) -> None:
        self._tasks, self._cores = tasks, cores
        self._dependents, self._missing = _dependents(tasks)
        self._begin, self._end = [0.0] * len(tasks), [-1.0] * len(tasks)
        self._has_worked = [False] * len(tasks)
        self._now = self._shared_clock = 0.0
        self._alone: list[tuple[float, int]] = []
        """Heap of the tasks that run without a share of the cores: (end time, index of the task)."""
        self._sharing: list[tuple[float, int]] = []
        """Heap of the tasks that share cores: (shared clock at the end, index of the task)."""

    def run(self) -> list[Span]:
        self._start([index for index, missing in enumerate(self._missing) if missing == 0])
        while self._alone or self._sharing:
            self._start(self._next_to_end())
        stuck = [task for task, end in zip(self._tasks, self._end, strict=True) if end < 0]
        if stuck:
            raise ValueError(f"{len(stuck)} tasks never begin, the first of them {stuck[0]}")
        return [Span(begin, end) for begin, end in zip(self._begin, self._end, strict=True)]

    def _start(self, ready: list[int]) -> None:
        """Start tasks. Tasks that take no time end at once, and the tasks that waited for them start as well."""
        while ready:
            index = ready.pop()
            task = self._tasks[index]
            self._begin[index] = self._now
            self._has_worked[index] = task.seconds > 0 and not self._is_dropped(task)
            if not self._has_worked[index]:
                ready.extend(self._ended(index))
            elif task.needs_core and self._cores is not None:
                heapq.heappush(self._sharing, (self._shared_clock + task.seconds, index))
            else:
                heapq.heappush(self._alone, (self._now + task.seconds, index))

    def _is_dropped(self, task: Task) -> bool:
        is_late = task.dropped_after is not None and self._end[task.dropped_after] >= 0
        return is_late or (task.done_by is not None and self._has_worked[task.done_by])

    def _next_to_end(self) -> list[int]:
        """Advance to the next end of a task; return the tasks that can start now."""
        pace = min(1.0, self._cores / len(self._sharing)) if self._cores is not None and self._sharing else 1.0
        shared_end = self._now + (self._sharing[0][0] - self._shared_clock) / pace if self._sharing else float("inf")
        own_end = self._alone[0][0] if self._alone else float("inf")
        now = min(shared_end, own_end)
        if shared_end <= own_end:
            self._shared_clock, index = heapq.heappop(self._sharing)
        else:
            self._shared_clock += (now - self._now) * pace
            _, index = heapq.heappop(self._alone)
        self._now = now
        return self._ended(index)

    def _ended(self, index: int) -> list[int]:
        self._end[index] = self._now
        free = []
        for follower in self._dependents[index]:
            self._missing[follower] -= 1
            if self._missing[follower] == 0:
                free.append(follower)
        return free


def _dependents(tasks: Sequence[Task]) -> tuple[list[list[int]], list[int]]:
    """Return for each task the tasks that wait for it, and the number of tasks that it waits for."""
    dependents: list[list[int]] = [[] for _ in tasks]
    missing = [0] * len(tasks)
    last: dict[tuple[int, str], int] = {}
    for index, task in enumerate(tasks):
        awaited = {*task.follows, *([last[task.stream]] if task.stream in last else [])}
        missing[index] = len(awaited)
        for before in awaited:
            dependents[before].append(index)
        last[task.stream] = index
    return dependents, missing
