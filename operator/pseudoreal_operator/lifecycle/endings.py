"""Steps that end a job or an execution. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from pseudoreal_api.names import claim_name, work_folder
from pseudoreal_api.status.status import Fault, PseudoRealJobStatus

from pseudoreal_operator import clock
from pseudoreal_operator.failures import results
from pseudoreal_operator.failures.classify import is_of_its_node
from pseudoreal_operator.foreign import clean
from pseudoreal_operator.lifecycle.retries import exhaustion, wait_seconds, with_disruption, with_fault, with_retry
from pseudoreal_operator.lifecycle.step import Step, stands
from pseudoreal_operator.observe.case import Case
from pseudoreal_operator.observe.observed import Pod, PodPhase
from pseudoreal_operator.observe.stages import changed, started
from pseudoreal_operator.status.conditions import Claim, refused


@dataclass(frozen=True)
class Reason:
    """Why an execution ends: one word, a sentence, where it began if that is known, and whether it counts."""

    word: str
    sentence: str
    pod: Pod | None = None
    counts: bool = True


def refuse(status: PseudoRealJobStatus, sentence: str, now: datetime) -> Step:
    """The job cannot run as it is written."""
    return replace(_failed(status, "InvalidSpec", sentence, now), accepted=refused(sentence))


def unforeseen(error: Exception) -> str:
    """A sentence for what the checks of a spec did not think of."""
    said = f"{type(error).__name__}: {clean(str(error))}"
    return f"No pods can be made of the spec: {said}. Most likely spec.pod.template is not as in a pod; correct it"


def fail(case: Case, memory: PseudoRealJobStatus, reason: str, sentence: str) -> Step:
    phases = changed(memory.phases, case.stage.index, state="Failed")
    sentences = " ".join([sentence, *_way_on(case, memory)])
    return _failed(memory.model_copy(update={"phases": phases}), reason, sentences, case.now)


def _way_on(case: Case, memory: PseudoRealJobStatus) -> Iterator[str]:
    if not memory.checkpoint:
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


def succeed(memory: PseudoRealJobStatus, now: datetime) -> Step:
    last = memory.phases[-1]
    text = f"All phases are done at step {last.step}; the model is checkpoint {last.end_checkpoint}."
    return Step(
        memory.model_copy(update={"completion_time": clock.to_text(now)}),
        "Succeeded",
        stands("Succeeded", "The job is done."),
        ended=Claim("Succeeded", "True", "AllPhasesDone", text),
    )


def restart_or_fail(case: Case, why: Reason) -> Step:
    """Another execution, as long as spec.restart allows one. Its children come later, when the number is safe in the
    status."""
    memory = results.with_checkpoints(case.status, case.words)
    exhausted = exhaustion(memory, case.spec.restart, case.now, counts=why.counts)
    if exhausted:
        return fail(case, memory, "RestartsExhausted", f"{why.sentence} {exhausted} What to do: {case.logs_command}")
    memory = remembered(case, started(memory, case.stage), why)
    text = f"{why.sentence} {_continuation(case, memory)}"
    return announce(
        case, with_retry(memory, counts=why.counts), "Restarting", text, wait_seconds(memory, case.spec.restart)
    )


def announce(case: Case, memory: PseudoRealJobStatus, reason: str, text: str, wait: int) -> Step:
    """A new execution of whatever stage the memory is at, after `wait` seconds."""
    after = clock.to_text(_failed_at(case) + timedelta(seconds=wait))
    update = {"execution_attempt": memory.execution_attempt + 1, "restart_after": after, "attempt_time": None}
    return Step(memory.model_copy(update=update), "Restarting", stands(reason, f"{text}, not before {after}."))


def _failed_at(case: Case) -> datetime:
    """When the first pod ended badly: neither the end of the others nor an operator that was away makes a back-off
    longer."""
    ends = [pod.termination.finished for pod in case.pods if pod.phase is PodPhase.FAILED and pod.termination]
    ends = list(filter(None, ends)) or [case.job.ended if case.job and case.job.ended else ""]
    return min([case.now, *(clock.from_text(end) for end in ends if end)])


def remembered(case: Case, memory: PseudoRealJobStatus, why: Reason) -> PseudoRealJobStatus:
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
        return with_fault(memory, case.spec.restart, fault, case.now)
    if pod and is_of_its_node(pod):
        return with_disruption(memory, case.spec.restart, fault, case.now)
    return memory


def _continuation(case: Case, memory: PseudoRealJobStatus) -> str:
    place = f"checkpoint {memory.checkpoint.latest} or a newer one" if memory.checkpoint else "the newest checkpoint"
    return f"Execution {memory.execution_attempt + 1} at {case.stage.title} goes on from {place}"


def _failed(memory: PseudoRealJobStatus, reason: str, sentence: str, now: datetime) -> Step:
    update = {"completion_time": clock.to_text(now), "restart_after": None, "transition": None}
    return Step(
        memory.model_copy(update=update),
        "Failed",
        stands("Failed", "The job failed; the condition Failed says why."),
        ended=Claim("Failed", "True", reason, sentence),
    )
