"""Decisions that end a job or an execution. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from pseudoreal_api.names import claim_name, work_folder
from pseudoreal_api.status.status import Fault, PseudoRealJobStatus

from pseudoreal_operator import clock
from pseudoreal_operator.failures import results
from pseudoreal_operator.failures.classify import is_of_its_node
from pseudoreal_operator.foreign import clean
from pseudoreal_operator.lifecycle.decision import Decision, event, stands, untold
from pseudoreal_operator.lifecycle.retries import exhaustion, wait_seconds, with_disruption, with_fault, with_retry
from pseudoreal_operator.observe.case import Case
from pseudoreal_operator.observe.observed import Pod, PodPhase
from pseudoreal_operator.observe.stages import changed, started
from pseudoreal_operator.status.conditions import Claim, refused
from pseudoreal_operator.status.events import Event, Reason


@dataclass(frozen=True)
class Cause:
    """Why an execution ends: one word, a sentence, where it began if that is known, and whether it counts."""

    word: str
    sentence: str
    pod: Pod | None = None
    counts: bool = True


def refuse(status: PseudoRealJobStatus, sentence: str, now: datetime) -> Decision:
    """The job cannot run as it is written."""
    told = Event(Reason.FAILED, sentence, stage=0, execution=1)
    return replace(_failed(status, "InvalidSpec", sentence, now), events=(told,), accepted=refused(sentence))


def unforeseen(error: Exception) -> str:
    """A sentence for what the checks of a spec did not think of."""
    said = f"{type(error).__name__}: {clean(str(error))}"
    return f"No pods can be made of the spec: {said}. Most likely spec.pod.template is not as in a pod; correct it"


def fail(case: Case, status: PseudoRealJobStatus, reason: str, sentence: str) -> Decision:
    phases = changed(status.phases, case.stage.index, state="Failed")
    sentences = " ".join([sentence, *_way_on(case, status)])
    failed = _failed(status.model_copy(update={"phases": phases}), reason, sentences, case.now)
    return replace(failed, events=(*untold(case), event(case, Reason.FAILED, sentences)))


def _way_on(case: Case, status: PseudoRealJobStatus) -> Iterator[str]:
    if not status.checkpoint:
        return
    way = f"with spec.checkpoint.continueFrom: {work_folder(case.metadata.name, case.metadata.uid)}"
    volume = case.spec.checkpoint.volume
    if volume is None or volume.claim is None:
        yield f"(Its checkpoints stay: a new job goes on from them {way})"
        return
    way += f" and spec.checkpoint.volume.claimName: {claim_name(case.metadata.name)}"
    if volume.claim.policy == "Retain":
        yield f"(Its checkpoints stay: a new job goes on from them {way})"
    else:
        yield (
            "(Its checkpoints go when this job is deleted, as spec.checkpoint.volume.claim.policy says: keep it while"
            f" a new job of another name goes on from them {way})"
        )


def succeed(case: Case, status: PseudoRealJobStatus, *events: Event) -> Decision:
    last = status.phases[-1]
    text = f"All phases are done at step {last.step}; the model is checkpoint {last.end_checkpoint}."
    return Decision(
        status.model_copy(update={"completion_time": clock.to_text(case.now)}),
        "Succeeded",
        stands("Succeeded", "The job is done."),
        events=(*events, event(case, Reason.SUCCEEDED, text)),
        ended=Claim("Succeeded", "True", "AllPhasesDone", text),
    )


def restart_or_fail(case: Case, why: Cause, *also_told: Reason) -> Decision:
    """Another execution, as long as spec.restart allows one. Its children come later, when the number is safe in the
    status. Events of the reasons `also_told` say the same as the one of the failed execution."""
    status = results.with_checkpoints(case.status, case.words)
    exhausted = exhaustion(status, case.spec.restart, case.now, counts=why.counts)
    if exhausted:
        return fail(case, status, "RestartsExhausted", f"{why.sentence} {exhausted} What to do: {case.logs_command}")
    status = remembered(case, started(status, case.stage), why)
    text = f"{why.sentence} {_continuation(case, status)}"
    new = Announcement("Restarting", text, (*also_told, Reason.ATTEMPT_FAILED))
    return announce(case, with_retry(status, counts=why.counts), new, wait_seconds(status, case.spec.restart))


@dataclass(frozen=True)
class Announcement:
    """How a new execution is told of: the reason of the condition, the text, and the reasons of the events."""

    reason: str
    text: str
    told: tuple[Reason, ...]


def announce(case: Case, status: PseudoRealJobStatus, new: Announcement, wait: int) -> Decision:
    """A new execution of whatever stage the status is at, after `wait` seconds."""
    after = clock.to_text(_failed_at(case) + timedelta(seconds=wait))
    update = {"execution_attempt": status.execution_attempt + 1, "restart_after": after, "attempt_time": None}
    text = f"{new.text}, not before {after}."
    told = [event(case, reason, text) for reason in new.told]
    return Decision(
        status.model_copy(update=update),
        "Restarting",
        stands(new.reason, text),
        events=(*untold(case), *told, *_avoided(case, status)),
    )


def _avoided(case: Case, status: PseudoRealJobStatus) -> Iterator[Event]:
    for node in status.avoided_nodes:
        if node not in case.status.avoided_nodes:
            text = f"Faults of this job began on node {node} again and again; its pods go elsewhere if they can."
            yield event(case, Reason.NODE_AVOIDED, text, detail=node)


def _failed_at(case: Case) -> datetime:
    """When the first pod ended badly: neither the end of the others nor an operator that was away makes a back-off
    longer."""
    ends = [pod.termination.finished for pod in case.pods if pod.phase is PodPhase.FAILED and pod.termination]
    ends = list(filter(None, ends)) or [case.job.ended if case.job and case.job.ended else ""]
    return min([case.now, *(clock.from_text(end) for end in ends if end)])


def remembered(case: Case, status: PseudoRealJobStatus, why: Cause) -> PseudoRealJobStatus:
    """With what ended the execution, if it counts or says something of a node."""
    pod = why.pod
    fault = Fault(
        attempt=case.run.attempt,
        time=clock.to_text(case.now),
        reason=why.word,
        pod=pod.name if pod else None,
        node=(pod.node or None) if pod else None,
    )
    if why.counts:
        return with_fault(status, case.spec.restart, fault, case.now)
    if pod and is_of_its_node(pod):
        return with_disruption(status, case.spec.restart, fault, case.now)
    return status


def _continuation(case: Case, status: PseudoRealJobStatus) -> str:
    place = f"checkpoint {status.checkpoint.latest} or a newer one" if status.checkpoint else "the newest checkpoint"
    return f"Execution {status.execution_attempt + 1} at {case.stage.title} goes on from {place}"


def _failed(status: PseudoRealJobStatus, reason: str, sentence: str, now: datetime) -> Decision:
    update = {"completion_time": clock.to_text(now), "restart_after": None, "transition": None}
    return Decision(
        status.model_copy(update=update),
        "Failed",
        stands("Failed", "The job failed; the condition Failed says why."),
        ended=Claim("Failed", "True", reason, sentence),
    )
