"""What a rule decides, and what rules say most. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from pseudoreal_api.status.status import PseudoRealJobStatus

from pseudoreal_operator.observe.case import Case
from pseudoreal_operator.observe.observed import Role
from pseudoreal_operator.observe.stages import Stage, is_started
from pseudoreal_operator.status.conditions import ACCEPTED, NOT_SUSPENDED, Claim
from pseudoreal_operator.status.events import Event, Reason


@dataclass(frozen=True)
class Decision:
    """What a rule decides. `status` is the new one, but for its conditions and its summary. `events` tell what has
    changed with it, in that order: where the status stays, there are none. `children` is the stage whose children must
    be there; no other Job may run."""

    status: PseudoRealJobStatus
    summary: str
    progressing: Claim
    events: tuple[Event, ...] = ()
    children: Stage | None = None
    accepted: Claim = ACCEPTED
    suspended: Claim = NOT_SUSPENDED
    ended: Claim | None = None
    wake_after: float | None = 0.0
    """Seconds; 0 for at once, None for not before something changes."""


def progresses(reason: str, message: str) -> Claim:
    return Claim("Progressing", "True", reason, message)


def stands(reason: str, message: str) -> Claim:
    return Claim("Progressing", "False", reason, message)


def event(case: Case, reason: Reason, message: str, detail: str = "") -> Event:
    """An event of the present execution of the present stage."""
    return Event(reason, message, case.stage.number, case.run.attempt, detail)


def start_events(case: Case) -> Iterator[Event]:
    """Those that tell that the present execution has started; none where the status says so already."""
    if case.status.restart_after is not None:
        yield event(case, Reason.RESTART_STARTED, f"Execution {case.run.attempt} starts.")
    if is_started(case.status.phases, case.stage):
        return
    if case.stage.role is Role.DELINK:
        yield event(case, Reason.DELINK_STARTED, f"The delink into phase {case.stage.phase} starts.")
    else:
        yield event(case, Reason.PHASE_STARTED, f"Phase {case.stage.phase} starts.")


def untold(case: Case) -> tuple[Event, ...]:
    """The pass that asked for the pods may not have lived to say so."""
    return tuple(start_events(case)) if case.job is not None else ()
