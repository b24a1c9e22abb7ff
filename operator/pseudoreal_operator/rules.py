"""The rules, in order: the first that applies decides what to do. Pure."""

from datetime import timedelta

from pseudoreal_operator import clock, conditions, results
from pseudoreal_operator.acceptance import check
from pseudoreal_operator.case import Case, Step, progresses, stands
from pseudoreal_operator.classify import Cause, classify
from pseudoreal_operator.conditions import Claim
from pseudoreal_operator.endings import fail, refuse, restart, succeed
from pseudoreal_operator.observed import JobState, Role
from pseudoreal_operator.obstacles import describe_obstacle
from pseudoreal_operator.stages import current_stage, first_phases, is_started, started

LOOK_SECONDS = 5.0
"""Between two looks at a running attempt: its progress, and what keeps its pods from starting, raise no event."""
WAIT_SECONDS = 2.0
"""Between two looks at pods that must end."""


def first_sight(case: Case) -> Step | None:
    if case.status.conditions:
        return None
    try:
        check(case.spec)
    except ValueError as error:
        return refuse(case.status, str(error), case.now)
    update = {"attempt": 1, "start_time": clock.to_text(case.now), "phases": first_phases(case.spec)}
    return Step(
        case.status.model_copy(update=update),
        "Pending",
        progresses("Accepted", f"Phase {case.spec.phases[0].name} is about to start."),
    )


def overdue(case: Case) -> Step | None:
    allowed = case.spec.deadlines.active_seconds
    if allowed is None or case.now < clock.from_text(case.status.start_time or "") + timedelta(seconds=allowed):
        return None
    text = (
        f"The job was not done {allowed} s after its start, which spec.deadlines.activeSeconds allows, in"
        f" {case.stage.title}. Its checkpoints remain; create a job with a later deadline."
    )
    return fail(case, case.status, "DeadlineExceeded", text)


def stage_done(case: Case) -> Step | None:
    if case.job is None or case.job.state is not JobState.COMPLETE:
        return None
    message = results.result_of(case.stage, case.pods)
    if message is None:
        return restart(case, f"Job {case.job.name} is complete, but its pod's result is gone.", counts=False)
    memory = results.recorded(started(case.status, case.stage), case.stage, message)
    following = current_stage(memory.phases)
    if case.stage.role is Role.TRAIN:
        progress = results.final_progress(case.spec, memory.progress, message, is_last=following is None, now=case.now)
        memory = memory.model_copy(update={"progress": progress})
    if following is None:
        return succeed(memory, case.now)
    done = case.stage.title.capitalize() if case.stage.role is Role.DELINK else f"Phase {case.stage.phase}"
    summary = "Delinking" if following.role is Role.DELINK else following.phase
    return Step(memory, summary, progresses("StageDone", f"{done} is done; {following.title} is about to start."))


def suspended(case: Case) -> Step | None:
    if not case.spec.suspend:
        return None
    alive = [pod.name for pod in case.seen.pods if pod.is_alive]
    saving = f" {', '.join(alive[:3])} may still save a checkpoint." if alive else ""
    text = f"spec.suspend is true.{saving} Set it to false to go on from the newest checkpoint."
    return Step(
        case.status.model_copy(update={"restart_after": None}),
        "Suspended",
        stands("Suspended", "The job is suspended."),
        suspended=Claim("Suspended", "True", "Requested", text),
        wake_after=WAIT_SECONDS if alive else None,
    )


def resumed(case: Case) -> Step | None:
    if not conditions.holds(case.status, "Suspended"):
        return None
    memory = case.status
    if is_started(memory.phases, case.stage):
        update = {"execution_attempt": memory.execution_attempt + 1, "restart_after": clock.to_text(case.now)}
        memory = memory.model_copy(update=update)
    return Step(memory, _waiting_summary(case), progresses("Resumed", f"{case.stage.title} is about to go on."))


def running(case: Case) -> Step | None:
    if case.job is None or case.job.state is not JobState.ACTIVE:
        return None
    memory = started(case.status, case.stage)
    if case.seen.report and case.stage.role is Role.TRAIN:
        progress = results.live_progress(case.seen.report, case.now)
        memory = memory.model_copy(update={"progress": progress})
    return Step(memory, _summary(case), _activity(case), children=case.stage, wake_after=LOOK_SECONDS)


def attempt_failed(case: Case) -> Step | None:
    if case.job is None or case.job.state is not JobState.FAILED:
        return None
    verdict = classify(case.job.name, case.pods)
    memory = results.with_checkpoints(case.status, case.pods)
    if verdict.cause is Cause.INVALID_JOB:
        return fail(case, memory, "InvalidJob", verdict.sentence)
    if verdict.cause is Cause.DISRUPTION:
        return restart(case, verdict.sentence, counts=False)
    if memory.restarts < case.spec.restart.max_restarts:
        return restart(case, verdict.sentence, counts=True)
    text = (
        f"{verdict.sentence} That was the last of {memory.restarts} restarts, which spec.restart.maxRestarts allows."
        f" What to do: {case.logs_command}"
    )
    return fail(case, memory, "RestartsExhausted", text)


def vanished(case: Case) -> Step | None:
    """The status says that the attempt began, and its Job is gone."""
    if not is_started(case.status.phases, case.stage) or case.status.restart_after is not None:
        return None
    return restart(case, f"Job {case.job_name} was deleted.", counts=False)


def backing_off(case: Case) -> Step | None:
    after = case.status.restart_after
    if after is None or clock.from_text(after) <= case.now:
        return None
    before = conditions.find(case.status, "Progressing")
    text = before.message if before else f"The next attempt starts not before {after}."
    wait = (clock.from_text(after) - case.now).total_seconds()
    return Step(case.status, "Restarting", stands("Restarting", text), wake_after=wait)


def leftovers(case: Case) -> Step | None:
    """Attempts must not overlap, nor must a job and a deleted one of the same name share children's names."""
    old = next((pod for pod in case.seen.pods if pod.is_alive), None)
    if old:
        text = (
            f"Waiting for pod {old.name} of an earlier attempt to end. If its node {old.node or '(none)'} is lost,"
            f" delete the pod: kubectl delete pod {old.name} -n {case.metadata.namespace} --force"
        )
    elif case.seen.foreign:
        text = f"Waiting until {case.seen.foreign[0]} of a deleted job of the same name is gone."
    else:
        return None
    return Step(case.status, _waiting_summary(case), stands("AwaitingCleanup", text), wake_after=WAIT_SECONDS)


def start(case: Case) -> Step:
    return Step(
        started(case.status, case.stage),
        _summary(case),
        progresses("Starting", f"Execution {case.status.execution_attempt} at {case.stage.title} starts."),
        children=case.stage,
        wake_after=LOOK_SECONDS,
    )


RULES = (
    first_sight,
    overdue,
    stage_done,
    suspended,
    resumed,
    running,
    attempt_failed,
    vanished,
    backing_off,
    leftovers,
)
"""`start` is what remains."""


def _summary(case: Case) -> str:
    return case.stage.phase if case.stage.role is Role.TRAIN else "Delinking"


def _waiting_summary(case: Case) -> str:
    return "Restarting" if case.status.restart_after else _summary(case)


def _activity(case: Case) -> Claim:
    assert case.job is not None, "there is a Job that runs"
    obstacle = describe_obstacle(case.job, case.pods)
    if obstacle:
        return stands(obstacle.reason, obstacle.message)
    wanted = case.spec.phases[case.stage.index].workers if case.stage.role is Role.TRAIN else 1
    ready = sum(pod.ready for pod in case.pods)
    # Pods that have done their part are not ready any more.
    if not case.pods or (ready < wanted and any(pod.is_alive for pod in case.pods)):
        text = f"{ready} of {wanted} pods run; if this lasts: kubectl describe job {case.job.name}"
        return progresses("Starting", text)
    doing = "training" if case.stage.role is Role.TRAIN else "delinking"
    number = case.status.execution_attempt
    return progresses(doing.capitalize(), f"Execution {number} at {case.stage.title} is {doing}.")
