"""Termination messages of pods that no list shows any more."""

from pseudoreal_api.wire.messages import TerminationMessage
from pseudoreal_operator.observe.stages import Execution, StageKind
from pseudoreal_operator.observe.termination_messages import TerminationMessages
from pseudoreal_operator.observe.view import Pod, PodPhase, Termination

JOB = ("default", "uid")
EXECUTION = Execution("pseudo", StageKind.TRAIN, 1)


def pod(
    index: int, step: int, execution: Execution = EXECUTION, checkpoint: bool = True, phase: PodPhase = PodPhase.FAILED
) -> Pod:
    message = TerminationMessage(
        outcome="Yielded",
        phase=execution.phase,
        execution=execution.number,
        step=step,
        checkpoint=f"pseudo-{step}" if checkpoint else None,
    )
    ended = Termination(exit_code=75, reason="Error", text="", message=message)
    return Pod(f"pod-{execution.number}-{index}", execution, index, phase, termination=ended)


def test_messages_of_worker_0_and_of_the_newest_checkpoint_are_kept() -> None:
    messages = TerminationMessages()
    for one in (pod(0, 10), pod(1, 20), pod(2, 15), pod(3, 30, checkpoint=False)):
        messages.store(JOB, one)
    assert [one.index for one in messages.of_job(JOB, set())] == [0, 1]
    assert messages.of_job(JOB, {"pod-1-0", "pod-1-1"}) == (), "who is listed is not gone"
    assert messages.of_job(("default", "another"), set()) == ()


def test_messages_of_a_newer_execution_replace_older_ones() -> None:
    messages = TerminationMessages()
    messages.store(JOB, pod(0, 20, Execution("pseudo", StageKind.TRAIN, 2)))
    messages.store(JOB, pod(0, 10))
    assert [one.execution.number for one in messages.of_job(JOB, set())] == [2]
    messages.store(JOB, pod(0, 20, Execution("real", StageKind.DELINK, 2)))
    assert [one.execution.kind for one in messages.of_job(JOB, set())] == [StageKind.DELINK]


def test_killed_or_silent_pod_has_no_termination_message() -> None:
    messages = TerminationMessages()
    messages.store(JOB, pod(0, 10, phase=PodPhase.RUNNING))
    messages.store(JOB, Pod("pod", EXECUTION, 0, PodPhase.FAILED))
    assert messages.of_job(JOB, set()) == ()
    messages.forget(JOB)
