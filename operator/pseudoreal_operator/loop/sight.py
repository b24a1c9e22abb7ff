"""What one version of a job says that is counted, and what has happened between two of them. Pure.

The watch tells every version that is written, so what happened follows from what is in the cluster, whichever of the
operator's requests were lost or repeated.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pseudoreal_api.status.status import Fault, PseudoRealJobStatus

from pseudoreal_operator import clock
from pseudoreal_operator.failures.hang import STALLS
from pseudoreal_operator.status.conditions import find, has_ended

Json = dict[str, Any]

OTHER = "Other"
"""Reason of a restart of which the status keeps none."""
_AT_WORK = ("Training", "Straggling", "Finishing", "Unheard")
"""Reasons of the condition Progressing while ranks make steps."""
_Fault = tuple[int, int, str]
"""Execution, number of the restart in place (0: the pods ended), and reason."""


@dataclass(frozen=True, slots=True)
class Sight:
    """A version of a job. All moments are those that the status has."""

    namespace: str
    name: str
    told: bool = True
    """Whether the job has a status."""
    state: str = "Pending"
    execution: int = 0
    restarting: bool = False
    """Whether another execution is announced."""
    faults: frozenset[_Fault] = frozenset()
    disruptions: frozenset[_Fault] = frozenset()
    standing: str | None = None
    """Reason for which a job that has not ended does not go on; None: it does."""
    failed: str | None = None
    """Reason for which the job has failed."""
    complete: bool = False
    ended_phases: frozenset[tuple[str, datetime, datetime]] = frozenset()
    """Names, beginnings and ends of phases."""
    delinked: frozenset[str] = frozenset()
    """Phases that a delink has prepared."""
    delink_began: datetime | None = None
    unsaved_since: datetime | None = None
    """Moment from which training is lost when its pods are; None where the job does not train."""


def sight_of(body: Json) -> Sight:
    """What the object of a job says. Raises ValueError for a status that this release cannot read."""
    metadata = body["metadata"]
    status = PseudoRealJobStatus.model_validate(body.get("status") or {})
    progressing, failed = find(status, "Progressing"), find(status, "Failed")
    reason, stands = (progressing.reason, progressing.status == "False") if progressing else ("", False)
    return Sight(
        namespace=metadata["namespace"],
        name=metadata["name"],
        told=bool(body.get("status")),
        state=status.state,
        execution=status.execution,
        restarting=reason == "Restarting",
        faults=frozenset(map(_fault, status.faults)),
        disruptions=frozenset(map(_fault, status.disruptions)),
        standing=reason if stands and not has_ended(status) else None,
        failed=failed.reason if failed else None,
        complete=find(status, "Complete") is not None,
        ended_phases=frozenset(_ended_phases(status)),
        delinked=frozenset(phase.name for phase in status.phases[1:] if phase.start_checkpoint),
        delink_began=clock.from_text(status.transition.start_time) if status.transition else None,
        unsaved_since=_unsaved_since(status) if reason in (*_AT_WORK, *STALLS) else None,
    )


def _fault(fault: Fault) -> _Fault:
    return fault.execution, fault.restart_in_place or 0, fault.reason


def _ended_phases(status: PseudoRealJobStatus) -> Iterator[tuple[str, datetime, datetime]]:
    for phase in status.phases:
        if phase.start_time and phase.completion_time:
            yield phase.name, clock.from_text(phase.start_time), clock.from_text(phase.completion_time)


def _unsaved_since(status: PseudoRealJobStatus) -> datetime | None:
    """The newest checkpoint, or the beginning of the execution, whichever is later: what an execution before has lost
    is lost already."""
    if status.state != "Training":
        return None
    saved = status.checkpoint.saved_time if status.checkpoint else None
    return max((clock.from_text(time) for time in (saved, status.execution_time) if time), default=None)


def restarts(before: Sight, after: Sight) -> Iterator[tuple[str, bool]]:
    """Reasons of the restarts, and whether each counts against spec.restart.maxRestarts. Of several within one change
    those that count are all told, of the others one."""
    new = after.faults - before.faults
    yield from ((reason, True) for _, _, reason in sorted(new))
    has_ended_pods = any(in_place == 0 for _, in_place, _ in new)
    if after.restarting and after.execution > before.execution > 0 and not has_ended_pods:
        known = sorted(after.disruptions - before.disruptions)
        yield known[-1][-1] if known else OTHER, False


def hangs(before: Sight, after: Sight) -> Iterator[str]:
    """Reasons of the hangs that were found, whatever spec.hang.action does about them."""
    reasons = [reason for _, _, reason in sorted(after.faults - before.faults)]
    reasons += [after.standing or ""] if after.standing != before.standing else []
    reasons += [after.failed or ""] if after.failed != before.failed else []
    return (reason for reason in reasons if reason in STALLS)


def phase_seconds(before: Sight, after: Sight) -> Iterator[float]:
    """Durations of the phases that have ended."""
    return ((end - begin).total_seconds() for _, begin, end in after.ended_phases - before.ended_phases)


def delink_seconds(before: Sight, after: Sight, now: datetime) -> float | None:
    """Seconds from the end of a phase until the next one could begin; None where no delink has ended."""
    if before.delink_began is None or not after.delinked - before.delinked:
        return None
    return max(0.0, (now - before.delink_began).total_seconds())
