"""Executions and restarts of a job on a time line. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from pseudoreal_trainer.report.steps import Steps
from pseudoreal_trainer.runtime.history import HistoryEntry

_LATEST = 4e9
"""Times after this one, in the year 2096, or before 1970 are no times of a training."""
_NOT_RECORDED = "not recorded: the pod at fault was killed or lost its node before it could write"


@dataclass(frozen=True)
class Run:
    """Time in which one set of processes trained, or a delink ran."""

    phase: str
    stage: str
    execution: int
    restart: int
    begin: float
    """Seconds since the epoch."""
    end: float | None
    """None: no end is recorded, and no later start."""
    outcome: str | None
    """None: no end is recorded."""
    step: int
    """Step at which it started."""


@dataclass(frozen=True)
class Restart:
    """Start of ranks that were not the first of their phase, with why the ranks before them had ended."""

    time: float | None
    """Seconds since the epoch; None: not recorded."""
    phase: str
    execution: int | None
    restart: int
    step: int
    checkpoint: str | None
    outcome: str | None
    cause: str
    ranks: tuple[int, ...] = ()
    """Ranks of the pod at fault; empty: not recorded."""
    suspect: int | None = None
    pod: str | None = None
    node: str | None = None


def times_of(history: Sequence[HistoryEntry]) -> list[HistoryEntry]:
    """Return the entries with a plausible time."""
    return [entry for entry in history if is_plausible(entry.time)]


def is_plausible(time: float) -> bool:
    """Return whether a time, in seconds since the epoch, may be one of a training."""
    return 0 < time < _LATEST


def runs_of(history: Sequence[HistoryEntry]) -> list[Run]:
    """Return the runs of all stages, in order. A run without a recorded end ends at the next start, at the latest."""
    runs: list[Run] = []
    for entry in times_of(history):
        if entry.event == "Started":
            if runs and runs[-1].end is None:
                runs[-1] = replace(runs[-1], end=entry.time)
            runs.append(_run(entry))
        elif entry.event == "Ended" and entry.stage == "delink":
            runs.append(replace(_run(entry), end=entry.time, outcome=entry.outcome))
        elif runs and runs[-1].outcome is None and runs[-1].phase == entry.phase:
            runs[-1] = replace(runs[-1], end=entry.time, outcome=entry.outcome)
    return runs


def _run(entry: HistoryEntry) -> Run:
    return Run(entry.phase, entry.stage, entry.execution, entry.restart, entry.time, None, None, entry.step)


def restarts_of(history: Sequence[HistoryEntry], steps: Steps) -> list[Restart]:
    """Return the restarts, oldest first: from the history if there is one, else those that the metrics show."""
    if not any(entry.event == "Started" for entry in history):
        return _restarts_in_metrics(steps)
    restarts: list[Restart] = []
    started: set[str] = set()
    ends: list[HistoryEntry] = []
    for entry in times_of(history):
        if entry.stage == "delink":
            continue
        if entry.event != "Started":
            ends.append(entry)
            continue
        if entry.phase in started:
            restarts.append(_restart(entry, _first_fault([end for end in ends if end.phase == entry.phase])))
        started.add(entry.phase)
        ends.clear()
    return restarts


def _first_fault(ends: Sequence[HistoryEntry]) -> HistoryEntry | None:
    """Return the end that explains the others: of a pod's own fault before one that followed, then the earliest."""
    failed = [end for end in ends if end.outcome != "Succeeded"]
    return min(failed, key=lambda end: (end.outcome == "Yielded", end.peer_lost, end.time), default=None)


def _restart(start: HistoryEntry, fault: HistoryEntry | None) -> Restart:
    found = Restart(
        start.time, start.phase, start.execution, start.restart, start.step, start.checkpoint, None, _NOT_RECORDED
    )
    if fault is None:
        return found
    is_own = not fault.peer_lost
    return replace(
        found,
        outcome=fault.outcome,
        cause=fault.message if is_own else f"{fault.message} (as a pod saw it that lost the one at fault)",
        ranks=tuple(fault.ranks) if is_own else (),
        suspect=fault.suspect,
        pod=fault.pod if is_own else None,
        node=fault.node if is_own else None,
    )


def _restarts_in_metrics(steps: Steps) -> list[Restart]:
    """Return a restart for each step that was the first of a process, but not of its phase."""
    restarts = []
    for index in steps.process_starts:
        if index > 0 and steps.phase[index] == steps.phase[index - 1]:
            phase, step = steps.phases[int(steps.phase[index])], int(steps.step[index]) - 1
            restarts.append(Restart(None, phase, None, 0, step, None, None, "not recorded: the job has no history"))
    return restarts


def utc(seconds: float) -> str:
    """Return the time as 2026-11-26 15:04:05 (UTC)."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
