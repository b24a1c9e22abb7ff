"""One version of a job for the metrics, and the events between two versions. Pure.

The events follow from the stored versions of a job, as the watch reports them. So it does not matter which of the
operator's requests were lost or repeated.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pseudoreal_api.status.status import Fault, PseudoRealJobStatus

from pseudoreal_operator import clock
from pseudoreal_operator.failures.hang import HANG_REASONS
from pseudoreal_operator.status.conditions import find, has_ended

Json = dict[str, Any]

OTHER = "Other"
"""Reason of a restart for which the status keeps no reason."""
_AT_WORK = ("Training", "Straggling", "Finishing", "Unheard")
"""Reasons of the condition Progressing while ranks make steps."""
_Fault = tuple[int, int, str]
"""Number of the execution, number of the restart in place (0: the failure was no restart in place), and reason."""


@dataclass(frozen=True, slots=True)
class JobSample:
    """A version of a job. All times are taken from its status."""

    namespace: str
    name: str
    has_status: bool = True
    state: str = "Pending"
    execution: int = 0
    restarting: bool = False
    """Whether another execution is announced."""
    faults: frozenset[_Fault] = frozenset()
    disruptions: frozenset[_Fault] = frozenset()
    not_progressing: str | None = None
    """Reason why a job that has not ended does not progress; None: it progresses."""
    failed: str | None = None
    """Reason of the condition Failed; None: the job has not failed."""
    complete: bool = False
    ended_phases: frozenset[tuple[str, datetime, datetime]] = frozenset()
    """Names, starts and ends of ended phases."""
    delinked: frozenset[str] = frozenset()
    """Names of the phases with a completed delink."""
    delink_began: datetime | None = None
    unsaved_since: datetime | None = None
    """Start of the training that would be lost with the pods: time of the newest checkpoint, or of the execution's
    start if that is later; None: the job does not train."""


def sample_of(body: Json) -> JobSample:
    """Return the sample of a job's object. Raises ValueError for a status that this release cannot read."""
    metadata = body["metadata"]
    status = PseudoRealJobStatus.model_validate(body.get("status") or {})
    progressing, failed = find(status, "Progressing"), find(status, "Failed")
    reason, stands = (progressing.reason, progressing.status == "False") if progressing else ("", False)
    return JobSample(
        namespace=metadata["namespace"],
        name=metadata["name"],
        has_status=bool(body.get("status")),
        state=status.state,
        execution=status.execution,
        restarting=reason == "Restarting",
        faults=frozenset(map(_fault, status.faults)),
        disruptions=frozenset(map(_fault, status.disruptions)),
        not_progressing=reason if stands and not has_ended(status) else None,
        failed=failed.reason if failed else None,
        complete=find(status, "Complete") is not None,
        ended_phases=frozenset(_ended_phases(status)),
        delinked=frozenset(phase.name for phase in status.phases[1:] if phase.start_checkpoint),
        delink_began=clock.from_text(status.transition.start_time) if status.transition else None,
        unsaved_since=_unsaved_since(status) if reason in (*_AT_WORK, *HANG_REASONS) else None,
    )


def _fault(fault: Fault) -> _Fault:
    return fault.execution, fault.restart_in_place or 0, fault.reason


def _ended_phases(status: PseudoRealJobStatus) -> Iterator[tuple[str, datetime, datetime]]:
    for phase in status.phases:
        if phase.start_time and phase.completion_time:
            yield phase.name, clock.from_text(phase.start_time), clock.from_text(phase.completion_time)


def _unsaved_since(status: PseudoRealJobStatus) -> datetime | None:
    """Return the time of the newest checkpoint, or the start of the execution if that is later: training that an
    earlier execution lost is lost already. None if the job does not train."""
    if status.state != "Training":
        return None
    saved = status.checkpoint.saved_time if status.checkpoint else None
    return max((clock.from_text(time) for time in (saved, status.execution_time) if time), default=None)


def restarts(before: JobSample, after: JobSample) -> Iterator[tuple[str, bool]]:
    """Yield the reason of each restart, and whether the restart counts against spec.restart.maxRestarts. All restarts
    that count are yielded. Of several other restarts between two versions, only one is yielded."""
    new = after.faults - before.faults
    yield from ((reason, True) for _, _, reason in sorted(new))
    has_ended_pods = any(in_place == 0 for _, in_place, _ in new)
    if after.restarting and after.execution > before.execution > 0 and not has_ended_pods:
        known = sorted(after.disruptions - before.disruptions)
        yield known[-1][-1] if known else OTHER, False


def hangs(before: JobSample, after: JobSample) -> Iterator[str]:
    """Return the reasons of the hangs that were detected between two versions, for every value of spec.hang.action."""
    reasons = [reason for _, _, reason in sorted(after.faults - before.faults)]
    reasons += [after.not_progressing or ""] if after.not_progressing != before.not_progressing else []
    reasons += [after.failed or ""] if after.failed != before.failed else []
    return (reason for reason in reasons if reason in HANG_REASONS)


def phase_seconds(before: JobSample, after: JobSample) -> Iterator[float]:
    """Return the durations in seconds of the phases that ended between two versions."""
    return ((end - begin).total_seconds() for _, begin, end in after.ended_phases - before.ended_phases)


def delink_seconds(before: JobSample, after: JobSample, now: datetime) -> float | None:
    """Return the seconds from the end of a phase until the next phase could start; None if no delink ended between two
    versions."""
    if before.delink_began is None or not after.delinked - before.delinked:
        return None
    return max(0.0, (now - before.delink_began).total_seconds())
