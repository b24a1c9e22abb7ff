"""The live line of the demo shows the job's progress, or the reason why it waits."""

from typing import Any

from pseudoreal_dev.demo.follow import describe, read_status


def _status(state: str, **more: Any) -> Any:
    return read_status({"status": {"state": state, **more}})


def _condition(kind: str, status: str, message: str) -> dict[str, str]:
    return {
        "type": kind,
        "status": status,
        "reason": "Why",
        "message": message,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }


def test_a_training_phase_shows_step_loss_and_the_time_left() -> None:
    progress = {
        "step": 40,
        "totalSteps": 300,
        "loss": "2.1000",
        "validationLoss": "2.2000",
        "tokensPerSecond": "8123.4",
        "phaseRemainingSeconds": 17,
        "lastUpdatedTime": "2026-01-01T00:00:00Z",
    }
    status = _status("Training", currentPhase="real", progress=progress)
    line = describe(status, 61.2)
    wanted = "61s real step 40/300 loss 2.1000 validation 2.2000 8,123 tokens/s phase ends in 17s"
    assert " ".join(line.split()) == wanted


def test_a_waiting_job_shows_the_message_of_its_condition() -> None:
    status = _status("Pending", conditions=[_condition("Progressing", "False", "the image is being pulled")])
    assert describe(status, 3).endswith("the image is being pulled")


def test_a_failed_job_shows_why() -> None:
    conditions = [_condition("Progressing", "False", "ended"), _condition("Failed", "True", "no such corpus")]
    assert describe(_status("Failed", conditions=conditions), 3).endswith("Why: no such corpus")


def test_a_job_without_a_status_waits_for_the_operator() -> None:
    assert describe(read_status(None), 0).endswith("waiting for the operator")
