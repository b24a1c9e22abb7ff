"""Limits on time: the rules that end a job, or a try, when one is over, and the clocks that they go by. Pure.

Clocks stand still while a job is suspended, or while a queue holds its pods.
"""

from datetime import datetime, timedelta

from pseudoreal_api.status.status import Transition

from pseudoreal_operator import clock
from pseudoreal_operator.failures.obstacles import describe_obstacle
from pseudoreal_operator.lifecycle.again import roll_back
from pseudoreal_operator.lifecycle.decisions import Decision, fail
from pseudoreal_operator.observe.case import Case, JobState
from pseudoreal_operator.observe.stages import StageKind
from pseudoreal_operator.status import conditions


def overdue(case: Case) -> Decision | None:
    allowed = case.spec.deadlines.active_seconds
    if allowed is None or _is_paused(case) or case.now < active_deadline(case, allowed):
        return None
    text = (
        f"The job was not done {allowed} s after it was started or resumed, which spec.deadlines.activeSeconds allows,"
        f" in {case.stage.title}."
    )
    return fail(case, case.status, "DeadlineExceeded", text)


def delink_overdue(case: Case) -> Decision | None:
    transition = case.status.transition
    if case.stage.kind is not StageKind.DELINK or transition is None or _is_paused(case):
        return None
    if case.now < clock.from_text(transition.deadline):
        return None
    obstacle = describe_obstacle(case.job, case.pods) if case.job else None
    why = obstacle.message if obstacle else f"What to do: {case.logs_command}"
    sentence = (
        f"{case.stage.title.capitalize()} was not done {case.spec.delink.timeout_seconds} s after the end of phase"
        f" {transition.from_phase}, which spec.delink.timeoutSeconds allows. {why}"
    )
    if case.spec.delink.on_timeout == "RollBack":
        return roll_back(case, sentence)
    return fail(case, case.status, "DelinkTimeout", sentence)


def never_started(case: Case) -> Decision | None:
    """Decides when not all pods run in time."""
    allowed, asked = case.spec.deadlines.startup_seconds, case.status.execution_time
    if case.job is None:
        return _never_made(case)
    if allowed is None or asked is None or case.job.state is not JobState.ACTIVE:
        return None
    if case.job.queued or case.started_pods >= case.workers or case.now < startup_deadline(case, allowed):
        return None
    obstacle = describe_obstacle(case.job, case.pods)
    why = obstacle.message if obstacle else f"What to do: kubectl describe job {case.job.name}"
    text = (
        f"{case.started_pods} of {case.workers} pods ran {allowed} s after they were asked for, which"
        f" spec.deadlines.startupSeconds allows. {why}"
    )
    return fail(case, case.status, "StartupDeadlineExceeded", text)


def _never_made(case: Case) -> Decision | None:
    """Decides when the API server refuses the pods themselves."""
    deadline = blocked_deadline(case)
    if deadline is None or case.now < deadline:
        return None
    said = conditions.find(case.status, "Progressing")
    text = (
        f"The pods could not even be asked for in {case.spec.deadlines.startup_seconds} s, which"
        f" spec.deadlines.startupSeconds allows. {said.message if said else ''}"
    )
    return fail(case, case.status, "StartupDeadlineExceeded", text.rstrip())


def active_deadline(case: Case, allowed: int) -> datetime:
    since = case.status.active_since or case.status.start_time or clock.to_text(case.now)
    return clock.from_text(since) + timedelta(seconds=allowed)


def startup_deadline(case: Case, allowed: int) -> datetime:
    begun = [case.status.execution_time or clock.to_text(case.now)]
    begun += [case.job.begun] if case.job and case.job.begun else []
    return max(map(clock.from_text, begun)) + timedelta(seconds=allowed)


def blocked_deadline(case: Case) -> datetime | None:
    """The time until which the API server may refuse the pods; None where there is no limit."""
    allowed, since = case.spec.deadlines.startup_seconds, case.status.blocked_since
    return clock.from_text(since) + timedelta(seconds=allowed) if allowed and since else None


def _is_paused(case: Case) -> bool:
    """Whether clocks stand still: from the wish to suspend until the job is resumed, and while a queue holds its
    pods."""
    return case.spec.suspend or conditions.holds(case.status, "Suspended") or case.status.queued_since is not None


def renewed_transition(case: Case) -> Transition | None:
    """The transition with its clock begun anew, as it stands still while the job is suspended."""
    if case.status.transition is None:
        return None
    later = case.now + timedelta(seconds=case.spec.delink.timeout_seconds)
    return case.status.transition.model_copy(update={"deadline": clock.to_text(later)})
