"""Rules of the lifecycle, in groups by the state of the present Job: the first rule that applies decides. Pure.

`standing_of` gives the state of the Job, and `RULES` has one group of rules for each state. If the state is not
COMPLETE, `decide` asks the rules of `UNLESS_COMPLETE` first, and then the rules of the state. `decide` asks a rule only
in the states of its groups, so a rule need not test the state itself.

Rules that belong to one subject are in the file of the subject (`deadlines`, `retraining`, ...); this file has the
other rules. If the members of an execution cannot train together, a rule only finds the kind of trouble; the table in
`recovery` decides.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from pseudoreal_api.status.status import PhaseStatus, Transition

from pseudoreal_operator import clock
from pseudoreal_operator.changes import status_with
from pseudoreal_operator.failures import results
from pseudoreal_operator.failures.classify import (
    MissingPods,
    Verdict,
    can_another_pod_succeed,
    classify,
    disappeared_sentence,
    has_lost_peer,
    worker_title,
)
from pseudoreal_operator.failures.hang import find_hang, is_silent
from pseudoreal_operator.lifecycle.acceptance import accept, find_broken_rules, find_problem
from pseudoreal_operator.lifecycle.clocks import is_stuck
from pseudoreal_operator.lifecycle.deadlines import (
    creation_timed_out,
    deadline_exceeded,
    delink_timed_out,
    fails_at_timeout,
    have_all_started,
    late_start_sentence,
    readmit_nodes,
    renewed_transition,
)
from pseudoreal_operator.lifecycle.decisions import (
    Cause,
    Decision,
    State,
    closing_events,
    event,
    fail,
    not_progressing,
    progressing,
    start_events,
    state_at,
    succeed,
    unposted_start_events,
    waiting_state,
)
from pseudoreal_operator.lifecycle.elastic import (
    Size,
    find_full_size,
    find_size_without_stuck_pods,
    find_smaller_size,
    is_abandoned,
    without_elastic_state,
)
from pseudoreal_operator.lifecycle.membership import LostWorkers, find_lost_workers
from pseudoreal_operator.lifecycle.progressing import change_events, preemption_events, progressing_condition
from pseudoreal_operator.lifecycle.recovery import Kind, Trouble, recover
from pseudoreal_operator.lifecycle.retraining import ended_too_early, repeat_requested, spec_changed, train_longer
from pseudoreal_operator.lifecycle.stopping import is_doomed
from pseudoreal_operator.observe.stages import (
    Stage,
    StageKind,
    current_stage,
    is_started,
    with_stage_started,
)
from pseudoreal_operator.observe.view import ChildJob, JobState, Pod, View
from pseudoreal_operator.status import conditions
from pseudoreal_operator.status.conditions import NewCondition
from pseudoreal_operator.status.events import Event, Reason

UNWATCHED_SECONDS = 5.0
"""Seconds between two passes over a job that waits for the removal of objects that are not watched."""


def complete_stage(view: View) -> Decision | None:
    job = _present_job(view)
    message = results.result_of(view.stage, view.terminated_pods)
    if message is None:
        return _without_result(view, job)
    if ended_too_early(view, message):
        return train_longer(view, message)
    status = results.with_result(with_stage_started(view.status, view.stage), view.stage, message, job.ended)
    following = current_stage(status.phases)
    events = (*closing_events(view), _done(view, status.phases[view.stage.index]))
    if view.stage.kind is StageKind.TRAIN:
        progress = results.final_progress(view.spec, status.progress, message, is_last=following is None, now=view.now)
        status = status_with(status, progress=progress)
    if following is None:
        return succeed(view, status_with(status, transition=None, elastic=None), *events)
    done = view.stage.title.capitalize() if view.stage.kind is StageKind.DELINK else f"Phase {view.stage.phase}"
    status = status_with(status, transition=_transition(view, following), elastic=None)
    text = f"{done} is done; {following.title} is about to start."
    return Decision(status, state_at(following), progressing("StageCompleted", text), events=events)


def _present_job(view: View) -> ChildJob:
    assert view.job is not None, "rules of a state in which the Job exists"
    return view.job


def _done(view: View, phase: PhaseStatus) -> Event:
    if view.stage.kind is StageKind.DELINK:
        start = conditions.start_checkpoint_text(view.spec, view.stage.index, phase)
        return event(view, Reason.DELINK_COMPLETED, f"Phase {phase.name} will start from {start}.")
    losses = f"loss {phase.loss}, validation loss {phase.validation_loss}, in nats per token"
    text = f"Phase {phase.name} is done at step {phase.step}: {losses}; checkpoint {phase.end_checkpoint}."
    return event(view, Reason.PHASE_COMPLETED, text)


def _without_result(view: View, job: ChildJob) -> Decision | None:
    pod = next((pod for pod in view.pods.succeeded if pod.index == 0), None)
    if pod is None:
        sentence = f"The pod of Job {job.name} was deleted, and its result with it."
        return recover(view, Trouble(Kind.JOB_GONE, Cause("ResultGone", sentence, counts=False)))
    text = (
        f"Pod {pod.name} ended with exit code 0, but its termination message is not a result of {view.stage.title}."
        " Check whether spec.pod sets another command, or an image of another release."
    )
    return recover(view, Trouble(Kind.JOB_GONE, Cause("ResultUnreadable", text, pod)))


def job_suspended(view: View) -> Decision | None:
    if not view.spec.suspend:
        return None
    alive = [pod.name for pod in view.observed.every_pod.alive[:3]]
    saving = f" {', '.join(alive)} may still save a checkpoint." if alive else ""
    text = f"spec.suspend is true.{saving} Set it to false to continue from the newest checkpoint."
    status = results.with_checkpoints(
        results.with_reported_checkpoint(view.status, view.last_reports), view.terminated_pods
    )
    # The detail is part of the event's name: a job may be suspended more than once before an execution starts.
    suspension = event(view, Reason.SUSPENDED, text, detail=view.status.active_since or "")
    return Decision(
        status_with(status, restart_after=None),
        "Suspended",
        not_progressing("Suspended", "The job is suspended."),
        events=() if conditions.is_true(view.status, "Suspended") else (*unposted_start_events(view), suspension),
        suspended=NewCondition("Suspended", "True", "Requested", text),
        requeue_after=None,
    )


def job_resumed(view: View) -> Decision | None:
    if not conditions.is_true(view.status, "Suspended"):
        return None
    if sentence := find_problem(view.spec, view.stage.index + 1):
        return _still_suspended(view, sentence)
    now, since = clock.to_text(view.now), view.status.active_since
    status = status_with(view.status, active_since=now, retries=None, transition=renewed_transition(view), elastic=None)
    if is_started(status.phases, view.stage):
        number = status.execution + 1
        status = status_with(status, execution=number, restart_after=now, execution_time=None)
    number = status.execution
    resumption = Event(
        Reason.RESUMED, f"The job continues with execution {number}.", view.stage.number, number, since or ""
    )
    claim = progressing("Resumed", f"{view.stage.title} is about to continue.")
    return Decision(status, waiting_state(view), claim, events=(resumption,), with_dry_run=True)


def _still_suspended(view: View, sentence: str) -> Decision:
    """Keep the job suspended because a field that was edited during the suspension is invalid: create nothing, lose
    nothing."""
    text = f"{sentence} The job stays suspended: set spec.suspend to true, correct the field, and set it to false."
    return Decision(
        view.status,
        "Suspended",
        not_progressing("InvalidSpec", text),
        suspended=NewCondition("Suspended", "True", "InvalidSpec", text),
        requeue_after=None,
    )


def stage_hung(view: View) -> Decision | None:
    if view.stage.kind is not StageKind.TRAIN or view.spec.hang.action == "Report":
        return None
    hang = find_hang(view)
    if hang is None:
        return None
    is_final = view.spec.hang.action == "Fail"
    sentence = f"{hang.sentence} spec.hang.action is Fail." if is_final else hang.sentence
    lost = find_lost_workers(view)
    suspects = [pod.index for pod in (*hang.unreachable, *((hang.culprit,) if hang.culprit else ()))]
    # A pod that hangs in a save may still write files of the checkpoint that the new members would write, too. And
    # workers that do not report learn of no takeover.
    helps = hang.reason != "CheckpointStalled" and not all(
        is_silent(view, last_report) for last_report in view.reporting
    )
    return recover(
        view,
        Trouble(
            Kind.HANG,
            Cause(hang.reason, sentence, hang.culprit),
            is_final,
            lost=tuple(sorted({*lost.numbers, *suspects})),
            helps_another_pod=helps and (not lost.numbers or can_another_pod_succeed(_verdict_on_lost(view, lost))),
            reason=Reason.HANG_DETECTED,
        ),
    )


def peers_wait(view: View) -> Decision | None:
    """Let spare pods replace lost workers, when other workers wait for the lost ones."""
    lost = find_lost_workers(view)
    # A worker that lost its connection reports that it waits; without such a report the workers may train on. A
    # connection to a stuck pod may last long, so there may be no report.
    if not lost.numbers or (lost.stuck is None and not _waits_to_restart(view)):
        return None
    verdict = _verdict_on_lost(view, lost)
    cause = Cause(verdict.reason, _sentences_on_lost(view, lost, verdict), verdict.pod, verdict.action == "Restart")
    return recover(
        view,
        Trouble(Kind.PEERS_WAIT, cause, lost=lost.numbers, helps_another_pod=can_another_pod_succeed(verdict)),
    )


def _waits_to_restart(view: View) -> bool:
    return any(last_report.waits_to_restart for last_report in view.reporting)


def _verdict_on_lost(view: View, lost: LostWorkers) -> Verdict:
    missing = MissingPods(stuck=lost.stuck, workers=view.missing_workers)
    return classify(view.job_name, view.pods, view.spec.restart.rules, missing)


def _sentences_on_lost(view: View, lost: LostWorkers, verdict: Verdict) -> str:
    """Return the message about lost workers: first about their lost pods, then about the workers whose pods run but
    have not joined the other workers in time."""
    sentence = _sentence_on_lost_pods(view, lost, verdict)
    if not lost.late:
        return sentence
    joined = "has not joined its" if len(lost.late) == 1 else "have not joined their"
    return f"{sentence} {worker_title(lost.late).capitalize()} {joined} new peers in time."


def _sentence_on_lost_pods(view: View, lost: LostWorkers, verdict: Verdict) -> str:
    if verdict.pod is not None or view.pods.failed:
        return verdict.sentence
    if lost.stuck is not None:
        return f"Pod {lost.stuck.name} on node {lost.stuck.node or '(none)'} cannot be ended: its node may be lost."
    # find_lost_workers has found a lost pod that neither failed nor is stuck, so it is missing.
    return disappeared_sentence(view.job_name, view.missing_workers)


def execution_running(view: View) -> Decision | None:
    job = _present_job(view)
    status = results.with_reports(with_stage_started(view.status, view.stage), view.last_reports, view.now)
    if status.execution_time is None:
        # The pass that created the Job died before it could write this time.
        status = status_with(status, execution_time=job.start_time or clock.to_text(view.now))
    status = without_elastic_state(view, status)
    if job.queued:
        # Pods that the queue takes back save before they end.
        status = results.with_checkpoints(
            results.with_reported_checkpoint(status, view.last_reports), view.terminated_pods
        )
    condition = progressing_condition(view)
    events = (*unposted_start_events(view), *change_events(view, condition), *preemption_events(view))
    state: State = "Queued" if job.queued else state_at(view.stage)
    return Decision(status, state, condition, events=events, children=view.stage, requeue_after=None)


def pod_stuck(view: View) -> Decision | None:
    """End the execution when a pod cannot be ended, for instance on a node that is off: its Job and its peers wait
    for it. A stuck pod that is not a worker matters only once all workers have ended."""
    waited_for = view.pods if view.pods.alive else view.observed.every_pod.of(view.execution)
    pod = next((pod for pod in waited_for.leaving if is_stuck(pod, view.now)), None)
    if pod is None:
        return None
    deadline, node = pod.deletion_deadline, pod.node or "(none)"
    text = f"Pod {pod.name} should have ended by {deadline}, but still exists: its node {node} may be lost."
    return _after_failures(view, Kind.POD_STUCK, MissingPods(stuck=pod), text)


def worker_missing(view: View) -> Decision | None:
    """End the execution when a pod is missing without a termination message, for instance together with its node, and a
    peer lost its connection to the pod. The peer has ended, or waits in vain to restart its ranks in place."""
    if not view.missing_workers:
        return None
    witnesses = [pod for pod in view.pods.failed if has_lost_peer(pod)]
    is_over = witnesses and is_doomed(view.observed, view.status, view.execution, view.now)
    # Pods that a queue has admitted again after a takeover wait from their start on: the others may yet be created.
    if not is_over and not (_waits_to_restart(view) and have_all_started(view)):
        return None
    return _after_failures(view, Kind.WORKER_MISSING, MissingPods(workers=view.missing_workers))


def execution_failed(view: View) -> Decision | None:
    return _after_failures(view, Kind.JOB_FAILED, MissingPods(workers=view.missing_workers))


def child_job_deleted(view: View) -> Decision | None:
    """Start a new execution when the status says that the present execution has started, but its Job does not exist."""
    if not is_started(view.status.phases, view.stage) or view.status.restart_after is not None:
        return None
    cause = Cause("JobDeleted", f"Job {view.job_name} was deleted.", counts=False)
    return recover(view, Trouble(Kind.JOB_GONE, cause))


def startup_timed_out(view: View) -> Decision | None:
    """End the execution, or fail the job, when not all pods run in time."""
    text = late_start_sentence(view)
    if text is None:
        return None
    if fails_at_timeout(view):
        return recover(view, Trouble(Kind.LATE_START, Cause("StartupDeadlineExceeded", text), is_final=True))
    cause = Cause("StartupTimedOut", f"{text} They are let go.", counts=False, contended=True)
    return recover(view, Trouble(Kind.LATE_START, cause))


def scale_down(view: View) -> Decision | None:
    return _change_size(view, Kind.TOO_FEW_NODES, find_smaller_size(view))


def scale_up(view: View) -> Decision | None:
    return _change_size(view, Kind.SMALLER, find_full_size(view))


def abandon_stuck_pods(view: View) -> Decision | None:
    return _change_size(view, Kind.LEFT_BEHIND, find_size_without_stuck_pods(view))


def _change_size(view: View, kind: Kind, size: Size | None) -> Decision | None:
    return None if size is None else recover(view, Trouble(kind, Cause("Resized", size.why, counts=False), size=size))


def back_off(view: View) -> Decision | None:
    after = view.status.restart_after
    if after is None or clock.from_text(after) <= view.now:
        return None
    before = conditions.find(view.status, "Progressing")
    text = before.message if before else f"The next execution starts at {after} or later."
    wait = (clock.from_text(after) - view.now).total_seconds()
    return Decision(view.status, "Restarting", not_progressing("Restarting", text), requeue_after=wait)


def await_cleanup(view: View) -> Decision | None:
    """Wait for objects of earlier executions, and of a deleted job of the same name. Executions must not overlap, and a
    job must not share names of children with a deleted job."""
    waited_for = (pod for pod in view.observed.every_pod.alive if not _is_ignorable(view, pod))
    old, wait = next(waited_for, None), None
    if old:
        text = (
            f"Waiting for pod {old.name} of an earlier execution to end. If its node {old.node or '(none)'} is lost,"
            f" delete the pod: kubectl delete pod {old.name} -n {view.metadata.namespace} --force"
        )
    elif view.observed.orphans:
        # The Job was deleted without this pod. The checkpoint fence keeps the pod from committing, but the pod holds
        # GPUs.
        pod = view.observed.orphans[0]
        text = (
            f"Waiting for pod {pod} to end, whose Job no longer exists. To continue without waiting, delete the pod:"
            f" kubectl delete pod {pod} -n {view.metadata.namespace}"
        )
        wait = UNWATCHED_SECONDS
    elif view.observed.objects_of_deleted_job:
        text = f"Waiting until {view.observed.objects_of_deleted_job[0]} of a deleted job of the same name is gone."
        wait = UNWATCHED_SECONDS
    else:
        return None
    return Decision(view.status, waiting_state(view), not_progressing("AwaitingCleanup", text), requeue_after=wait)


def _is_ignorable(view: View, pod: Pod) -> bool:
    """Return whether a new execution may start while the pod exists: an abandoned pod, or a stuck pod that is not a
    worker and so has nothing to commit."""
    if is_abandoned(pod, view.status):
        return True
    return pod not in view.observed.pods and is_stuck(pod, view.now)


def start_execution(view: View) -> Decision:
    if sentence := _find_rules_broken_by_phase(view) or find_problem(view.spec, view.stage.index + 1):
        # A phase that was added to the spec cannot be removed again, so the job fails.
        return fail(view, view.status, "InvalidSpec", sentence)
    status = status_with(with_stage_started(view.status, view.stage), execution_time=clock.to_text(view.now))
    return Decision(
        status,
        state_at(view.stage),
        progressing("Starting", f"Execution {view.execution.number} at {view.stage.title} starts."),
        events=tuple(start_events(view)),
        children=view.stage,
        requeue_after=None,
    )


Decide = Callable[[View], Decision | None]
"""Function of a rule. Returns the decision if the rule applies; else None."""


@dataclass(frozen=True)
class Rule:
    """A rule, with the reasons for its position in its group."""

    decide: Decide
    before: Mapping[Decide, str]
    """Later rule -> reason why this rule stands before it. "Any order" means that the two never apply together."""


def _find_rules_broken_by_phase(view: View) -> str | None:
    """Return the sentences of the rules that the stage's phase breaks; None if it breaks none, or has begun."""
    index = view.stage.index
    if view.status.phases[index].state != "Pending":
        return None
    sentences = find_broken_rules(view.spec, view.metadata.name, index)
    if sentences is None or sentences == find_broken_rules(view.spec, view.metadata.name, index + 1):
        return None  # if any, a later phase breaks them
    return sentences


class Standing(StrEnum):
    """State of the Job of the present execution, as the rules tell them apart."""

    COMPLETE = "Complete"
    FAILED = "Failed"
    HELD = "Held"
    """Active, and a queue holds it: its pods are to end, or do not exist."""
    RUNNING = "Running"
    """Active, and no queue holds it."""
    ABSENT = "Absent"
    """It does not exist, or is being deleted while it runs."""


def standing_of(job: ChildJob | None) -> Standing:
    if job is None:
        return Standing.ABSENT
    if job.state is JobState.ACTIVE:
        return Standing.HELD if job.queued else Standing.RUNNING
    return Standing.COMPLETE if job.state is JobState.COMPLETE else Standing.FAILED


UNLESS_COMPLETE: tuple[Rule, ...] = (
    Rule(
        deadline_exceeded,
        {
            job_suspended: "any order: clocks stand still while spec.suspend is true",
            repeat_requested: "a job that is out of time ends, whatever is requested",
        },
    ),
    Rule(
        job_suspended,
        {
            job_resumed: "job_resumed reads only the condition Suspended; here spec.suspend is false",
            repeat_requested: "no execution starts while the job is suspended",
        },
    ),
    Rule(
        job_resumed,
        {repeat_requested: "every later decision sets Suspended to False, and only a resume renews the clocks"},
    ),
    Rule(
        repeat_requested,
        {delink_timed_out: "the requested phase is trained again, and a later delink has a clock of its own"},
    ),
    Rule(delink_timed_out, {}),
)
"""Rules for a Job in any state but COMPLETE; `decide` asks them before the rules of that state. They are about
deadlines, and about requests of the user (suspend, resume, repeat). spec.delink.onTimeout decides about a delink that
is out of time, whatever the state of its pods; the delink is not tried again."""

RULES: Mapping[Standing, tuple[Rule, ...]] = {
    # `decide` skips UNLESS_COMPLETE here: a stage that was done in time counts, even if the operator was away and sees
    # it late, and a resume or a request that starts a new execution would lose the result of this one.
    Standing.COMPLETE: (Rule(complete_stage, {}),),
    Standing.RUNNING: (
        Rule(
            spec_changed,
            {
                scale_down: "spec_changed makes a dry run; another rule would start an execution of an untested spec",
                scale_up: "spec_changed makes a dry run; another rule would start an execution of an untested spec",
            },
        ),
        Rule(
            scale_down,
            {
                scale_up: "any order: scale_up needs all workers running, scale_down needs some that do not run",
                readmit_nodes: "the pods that have nodes train now, instead of waiting for the excluded nodes as well",
                startup_timed_out: "with a shorter startupSeconds both apply: fewer workers train, instead of none",
            },
        ),
        Rule(
            scale_up,
            {readmit_nodes: "any order: scale_up needs all workers running, readmit_nodes needs one without a node"},
        ),
        Rule(
            readmit_nodes,
            {startup_timed_out: "pods may need only the excluded nodes; a startup timeout ends execution or job"},
        ),
        Rule(
            startup_timed_out,
            {stage_hung: "any order before the first step: the start clock of a hang runs once all pods have started"},
        ),
        Rule(
            stage_hung,
            {peers_wait: "spec.hang.action decides about a stage that stands still too long, whatever the cause"},
        ),
        Rule(
            peers_wait,
            {
                pod_stuck: "pod_stuck ends the execution because of the same pods, which spare pods can replace",
                worker_missing: "worker_missing ends the execution because of pods that spare pods can replace",
            },
        ),
        Rule(pod_stuck, {worker_missing: "both end the execution, and pod_stuck names the node that may be off"}),
        Rule(worker_missing, {execution_running: "execution_running accepts every active Job"}),
        Rule(execution_running, {}),
    ),
    Standing.HELD: (
        Rule(scale_down, {pod_stuck: "both start an execution, and the queue may admit the smaller one of scale_down"}),
        Rule(pod_stuck, {execution_running: "execution_running accepts every active Job"}),
        Rule(execution_running, {}),
    ),
    Standing.FAILED: (Rule(execution_failed, {}),),
    Standing.ABSENT: (
        Rule(
            creation_timed_out,
            {child_job_deleted: "any order: a Job that the API server refused never existed, and was not deleted"},
        ),
        Rule(
            child_job_deleted,
            {
                back_off: "any order: back_off needs status.restartAfter, and child_job_deleted needs its absence",
                await_cleanup: "the deletion is announced, and its backoff begins, before the Job's pods have ended",
            },
        ),
        Rule(
            back_off,
            {
                abandon_stuck_pods: "abandon_stuck_pods starts an execution at once, which would cut the backoff short",
                await_cleanup: "await_cleanup may poll, and before the end of the backoff nothing starts anyway",
            },
        ),
        Rule(
            abandon_stuck_pods,
            {await_cleanup: "await_cleanup would wait for the pods that abandon_stuck_pods abandons"},
        ),
        Rule(await_cleanup, {start_execution: "start_execution accepts every job without a Job"}),
        Rule(start_execution, {}),
    ),
}
"""State of the present Job -> its rules in order of evaluation; the last rule of each state always decides. The order
is semantics: several rules may apply to one observation."""


def decide(view: View) -> Decision:
    """Return the decision of the first rule that applies."""
    if not view.status.phases:
        return accept(view)  # fills status.phases: without phases there is no stage, which all rules read
    standing = standing_of(view.job)
    first = () if standing is Standing.COMPLETE else UNLESS_COMPLETE
    found = (rule.decide(view) for rule in (*first, *RULES[standing]))
    return next(decision for decision in found if decision)


def _transition(view: View, following: Stage) -> Transition | None:
    if following.kind is not StageKind.DELINK:
        return None
    return Transition(
        id=f"{view.stage.phase}-{following.phase}-e{view.execution.number}",
        from_phase=view.stage.phase,
        to_phase=following.phase,
        start_time=clock.to_text(view.now),
        deadline=clock.to_text(view.now + timedelta(seconds=view.spec.delink.timeout_seconds)),
    )


def _after_failures(view: View, kind: Kind, missing: MissingPods, more: str = "") -> Decision | None:
    verdict = classify(view.job_name, view.pods, view.spec.restart.rules, missing)
    sentence, counts = f"{verdict.sentence} {more}".rstrip(), verdict.action == "Restart"
    cause = Cause(verdict.reason, sentence, _origin(view, verdict.pod), counts)
    return recover(view, Trouble(kind, cause, is_final=verdict.action == "Fail"))


def _origin(view: View, pod: Pod | None) -> Pod | None:
    """Return the pod in which a fault began: the pod of the rank that the termination message of `pod` blames, else
    `pod`."""
    message = pod.termination.message if pod and pod.termination else None
    suspect = message.suspect if message else None
    return pod if suspect is None else view.pod_of_rank(suspect) or pod
