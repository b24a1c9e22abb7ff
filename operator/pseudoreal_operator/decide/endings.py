"""Steps that end a job or an execution. Pure."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from pseudoreal_api.names import claim_name, work_folder
from pseudoreal_api.status import Fault, PseudoRealJobStatus

from pseudoreal_operator import clock
from pseudoreal_operator.decide.step import Step, stands
from pseudoreal_operator.diagnose import results
from pseudoreal_operator.observe.case import Case
from pseudoreal_operator.observe.observed import Pod, PodPhase
from pseudoreal_operator.observe.stages import changed, started
from pseudoreal_operator.tell.conditions import Claim, refused

MAX_BACKOFF_SECONDS = 300
REMEMBERED_FAULTS = 100


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
    """Another execution, as long as spec.restart allows one."""
    exhausted = exhaustion(case) if why.counts else None
    if exhausted is None:
        return restart(case, why)
    memory = results.with_checkpoints(case.status, case.pods)
    return fail(case, memory, "RestartsExhausted", f"{why.sentence} {exhausted} What to do: {case.logs_command}")


def exhaustion(case: Case) -> str | None:
    """A sentence, when spec.restart allows no more restarts."""
    allowed, window = case.spec.restart.max_restarts, case.spec.restart.window_seconds
    used = len(recent_faults(case)) if window else case.status.restarts
    if used < allowed:
        return None
    within = f" within {window} s (spec.restart.windowSeconds)" if window else ""
    return f"That was after {used} restarts{within}, and spec.restart.maxRestarts allows {allowed}."


def restart(case: Case, why: Reason) -> Step:
    """Announces the next execution. Its children come later, when the number is safe in the status."""
    memory = results.with_checkpoints(started(case.status, case.stage), case.pods)
    memory = with_fault(case, memory, why) if why.counts else memory
    return announce(case, memory, "Restarting", f"{why.sentence} {_continuation(case, memory)}", counts=why.counts)


def announce(case: Case, memory: PseudoRealJobStatus, reason: str, text: str, *, counts: bool) -> Step:
    """A new execution of whatever stage the memory is at, after a back-off."""
    wait = _backoff_seconds(case) if counts else case.spec.restart.backoff_seconds
    after = clock.to_text(_failed_at(case) + timedelta(seconds=wait))
    update = {"execution_attempt": memory.execution_attempt + 1, "restart_after": after, "attempt_time": None}
    return Step(memory.model_copy(update=update), "Restarting", stands(reason, f"{text}, not before {after}."))


def _failed_at(case: Case) -> datetime:
    """When the first pod ended badly: neither the end of the others nor an operator that was away makes a back-off
    longer."""
    ends = [pod.termination.finished for pod in case.pods if pod.phase is PodPhase.FAILED and pod.termination]
    ends = list(filter(None, ends)) or [case.job.ended if case.job and case.job.ended else ""]
    return min([case.now, *(clock.from_text(end) for end in ends if end)])


def with_fault(case: Case, memory: PseudoRealJobStatus, why: Reason) -> PseudoRealJobStatus:
    pod = why.pod
    fault = Fault(
        attempt=case.run.attempt,
        time=clock.to_text(case.now),
        reason=why.word,
        pod=pod.name if pod else None,
        node=(pod.node or None) if pod else None,
    )
    faults = [*recent_faults(case), fault][-REMEMBERED_FAULTS:]
    return memory.model_copy(
        update={
            "attempt": memory.attempt + 1,
            "restarts": memory.restarts + 1,
            "faults": faults,
            "avoided_nodes": _avoided(memory.avoided_nodes, faults, case.spec.restart.avoid_nodes_after),
        }
    )


def recent_faults(case: Case) -> list[Fault]:
    """Those that spec.restart.windowSeconds still counts; without a window, all that are remembered."""
    window = case.spec.restart.window_seconds
    if window is None:
        return case.status.faults
    oldest = case.now - timedelta(seconds=window)
    return [fault for fault in case.status.faults if clock.from_text(fault.time) > oldest]


def _avoided(known: list[str], faults: list[Fault], limit: int) -> list[str]:
    counts = Counter(fault.node for fault in faults if fault.node)
    new = [node for node, count in counts.items() if count >= limit and node not in known]
    return [*known, *new][-REMEMBERED_FAULTS:]


def _continuation(case: Case, memory: PseudoRealJobStatus) -> str:
    place = f"checkpoint {memory.checkpoint.latest} or a newer one" if memory.checkpoint else "the newest checkpoint"
    return f"Execution {memory.execution_attempt + 1} at {case.stage.title} goes on from {place}"


def _backoff_seconds(case: Case) -> int:
    # Ten doublings are beyond the cap already; more would only make a huge integer.
    doublings = min(10, len(recent_faults(case)))
    return min(MAX_BACKOFF_SECONDS, case.spec.restart.backoff_seconds << doublings)


def _failed(memory: PseudoRealJobStatus, reason: str, sentence: str, now: datetime) -> Step:
    update = {"completion_time": clock.to_text(now), "restart_after": None, "transition": None}
    return Step(
        memory.model_copy(update=update),
        "Failed",
        stands("Failed", "The job failed; the condition Failed says why."),
        ended=Claim("Failed", "True", reason, sentence),
    )
