"""Time in a queue is nobody's fault: deadlines stand still while a queue holds the present execution's Job. Pure."""

from datetime import datetime, timedelta

from pseudoreal_api.status.status import PseudoRealJobStatus

from pseudoreal_operator import clock
from pseudoreal_operator.observe.observed import ChildJob, JobState


def with_queue(status: PseudoRealJobStatus, job: ChildJob | None, now: datetime) -> PseudoRealJobStatus:
    """The status with the clocks as the queue leaves them."""
    if job is not None and job.queued and job.state is JobState.ACTIVE:
        begun = status.queued_since or clock.to_text(min(now, _moment(job.held) or now))
        return status.model_copy(update={"queued_since": begun})
    since = status.queued_since or _unseen(status, job)
    if since is None:
        return status
    until = _admitted(job, clock.from_text(since), now)
    moved = _moved_on(status, until - clock.from_text(since))
    return moved.model_copy(update={"attempt_time": clock.to_text(until)}) if job else moved


def _moved_on(status: PseudoRealJobStatus, held: timedelta) -> PseudoRealJobStatus:
    transition = status.transition
    if transition is not None:
        transition = transition.model_copy(update={"deadline": _later(transition.deadline, held)})
    since = status.active_since and _later(status.active_since, held)
    return status.model_copy(update={"queued_since": None, "active_since": since, "transition": transition})


def _unseen(status: PseudoRealJobStatus, job: ChildJob | None) -> str | None:
    """Since when a queue held the Job that it let go before anybody looked, as while the operator was away."""
    admitted, asked = _moment(job.admitted) if job else None, _moment(status.attempt_time)
    return status.attempt_time if admitted and asked and admitted > asked else None


def _admitted(job: ChildJob | None, since: datetime, now: datetime) -> datetime:
    """When the hold that began at `since` was over. The Job controller may not have said so yet."""
    said = map(_moment, (job.admitted, job.begun)) if job else ()
    return min([now, *(moment for moment in said if moment and moment >= since)])


def _moment(text: str | None) -> datetime | None:
    return clock.from_text(text) if text else None


def _later(text: str, by: timedelta) -> str:
    return clock.to_text(clock.from_text(text) + by)
