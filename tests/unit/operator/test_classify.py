"""What a failed attempt means."""

from typing import Any

import pytest
from pseudoreal_api.messages import EXIT_CODES, Outcome, TerminationMessage
from pseudoreal_operator.classify import Cause, classify
from pseudoreal_operator.observed import Pod, PodPhase, Role, Run, Termination

RUN = Run("real", Role.TRAIN, 1)


def ended(index: int, outcome: Outcome, text: str = "", finished: str = "", **changes: Any) -> Pod:
    message = TerminationMessage(outcome=outcome, phase="real", attempt=1, message=text)
    code = EXIT_CODES[outcome].value
    phase = PodPhase.SUCCEEDED if code == 0 else PodPhase.FAILED
    values: dict[str, Any] = {"exit_code": code, "reason": "Error", "text": "", "message": message}
    return Pod(f"p{index}", RUN, index, phase, termination=Termination(**(values | changes), finished=finished))


def silent(index: int, exit_code: int, reason: str = "Error", text: str = "") -> Pod:
    return Pod(f"p{index}", RUN, index, PodPhase.FAILED, termination=Termination(exit_code, reason, text, None))


def preempted(index: int) -> Pod:
    return Pod(f"p{index}", RUN, index, PodPhase.FAILED, disruption="PreemptionByScheduler: made room")


@pytest.mark.parametrize(
    ("pods", "cause", "says"),
    [
        ([ended(0, "InvalidJob", "spec.data.path x is missing")], Cause.INVALID_JOB, "spec.data.path x is missing"),
        ([silent(0, 78)], Cause.INVALID_JOB, "Pod p0 (worker 0) refused the job"),
        ([ended(0, "Failed", "peer lost"), ended(1, "InvalidJob", "no corpus")], Cause.INVALID_JOB, "no corpus"),
        ([preempted(0), ended(1, "InvalidJob", "no corpus")], Cause.INVALID_JOB, "no corpus"),
        ([ended(0, "Yielded")], Cause.DISRUPTION, "Pod p0 (worker 0) was asked to stop"),
        ([ended(0, "Yielded"), ended(1, "Yielded")], Cause.DISRUPTION, "asked to stop"),
        ([silent(0, 75)], Cause.DISRUPTION, "asked to stop"),
        ([], Cause.DISRUPTION, "The pods of the-job were deleted"),
        ([ended(0, "Succeeded")], Cause.DISRUPTION, "deleted"),
        ([preempted(1)], Cause.DISRUPTION, "PreemptionByScheduler: made room"),
        ([ended(0, "Failed", "peer lost"), preempted(1)], Cause.DISRUPTION, "Pod p1 (worker 1) was disrupted"),
        ([ended(0, "Failed", "the disk is full")], Cause.FAULT, "exit code 1: the disk is full."),
        (
            [ended(0, "Yielded"), ended(1, "Failed", "NaN")],
            Cause.FAULT,
            "Pod p1 (worker 1) ended with exit code 1: NaN.",
        ),
        ([silent(0, 139)], Cause.FAULT, "Pod p0 (worker 0) ended with exit code 139."),
        ([silent(0, 128, "StartError", "no such file")], Cause.FAULT, "exit code 128 (StartError): no such file."),
        ([silent(0, 137, "OOMKilled")], Cause.FAULT, "resources.limits.memory of phase real"),
        ([preempted(1), silent(0, 137, "OOMKilled")], Cause.FAULT, "ran out of memory"),
        ([ended(0, "Failed", "peer lost"), silent(1, 137, "OOMKilled")], Cause.FAULT, "Pod p1 (worker 1) ran out"),
        (
            [Pod("p0", RUN, 0, PodPhase.FAILED, complaint="DeadlineExceeded: too long")],
            Cause.FAULT,
            "Pod p0 (worker 0) failed: DeadlineExceeded: too long.",
        ),
    ],
)
def test_causes(pods: list[Pod], cause: Cause, says: str) -> None:
    verdict = classify("the-job", pods)
    assert verdict.cause is cause
    assert says in verdict.sentence


def test_the_first_to_fail_is_named() -> None:
    later = ended(0, "Failed", "peer lost", finished="2030-01-01T00:00:09Z")
    first = ended(1, "Failed", "the disk is full", finished="2030-01-01T00:00:08Z")
    assert "the disk is full" in classify("the-job", [later, first]).sentence


def test_a_long_log_is_cut_at_its_beginning() -> None:
    sentence = classify("the-job", [silent(0, 1, text="x" * 5000 + "ValueError: the end")]).sentence
    assert sentence.endswith("ValueError: the end.")
    assert len(sentence) < 1000
