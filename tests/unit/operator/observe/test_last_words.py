"""What is known of pods that no list shows any more."""

from pseudoreal_api.wire.messages import TerminationMessage
from pseudoreal_operator.observe.last_words import LastWords
from pseudoreal_operator.observe.observed import Pod, PodPhase, Role, Run, Termination

JOB = ("default", "uid")
RUN = Run("pseudo", Role.TRAIN, 1)


def pod(index: int, step: int, run: Run = RUN, checkpoint: bool = True, phase: PodPhase = PodPhase.FAILED) -> Pod:
    message = TerminationMessage(
        outcome="Yielded",
        phase=run.phase,
        attempt=run.attempt,
        step=step,
        checkpoint=f"pseudo-{step}" if checkpoint else None,
    )
    ended = Termination(exit_code=75, reason="Error", text="", message=message)
    return Pod(f"pod-{run.attempt}-{index}", run, index, phase, termination=ended)


def test_the_first_pod_and_the_one_with_the_newest_checkpoint_are_remembered() -> None:
    words = LastWords()
    for one in (pod(0, 10), pod(1, 20), pod(2, 15), pod(3, 30, checkpoint=False)):
        words.hear(JOB, one)
    assert [one.index for one in words.of_job(JOB, [])] == [0, 1]
    assert words.of_job(JOB, ["pod-1-0", "pod-1-1"]) == (), "who is listed is not gone"
    assert words.of_job(("default", "another"), []) == ()


def test_a_new_execution_replaces_the_old_one_and_never_the_other_way_round() -> None:
    words = LastWords()
    words.hear(JOB, pod(0, 20, Run("pseudo", Role.TRAIN, 2)))
    words.hear(JOB, pod(0, 10))
    assert [one.run.attempt for one in words.of_job(JOB, [])] == [2]
    words.hear(JOB, pod(0, 20, Run("real", Role.DELINK, 2)))
    assert [one.run.role for one in words.of_job(JOB, [])] == [Role.DELINK]


def test_a_pod_that_was_killed_or_said_nothing_has_no_last_words() -> None:
    words = LastWords()
    words.hear(JOB, pod(0, 10, phase=PodPhase.RUNNING))
    words.hear(JOB, Pod("pod", RUN, 0, PodPhase.FAILED))
    assert words.of_job(JOB, []) == ()
    words.forget(JOB)
