"""Results that the Llama demo accepts."""

from typing import Any

import pytest
from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_dev.demo.child_job import end_of
from pseudoreal_dev.demo.llama import sentences
from pseudoreal_dev.machine.errors import DevError


def status(first: str = "9.7000", before: str = "6.2000", after: str = "6.2000", last: str = "5.1000") -> Any:
    phases = [
        {"name": "pseudo", "state": "Complete", "startValidationLoss": first, "validationLoss": before},
        {"name": "real", "state": "Complete", "startValidationLoss": after, "validationLoss": last},
    ]
    return PseudoRealJobStatus.model_validate({"phases": phases})


def test_a_good_result_is_told_in_sentences() -> None:
    loss, delink, export = sentences(status(), 1.75, 5.10003)
    assert loss == "validation loss 5.1000 nats per token, 1.750 bits per byte; it began with 9.7000"
    assert delink == "delinking changed nothing: 6.2000 before, 6.2000 after"
    assert "5.1000 with the exported model" in export


@pytest.mark.parametrize(
    ("found", "exported", "says"),
    [
        (status(last="9.7000"), 9.7, "the validation loss did not fall: 9.7 at first, 9.7 at last"),
        (status(last=""), 5.1, "the validation loss did not fall"),
        (status(after="6.2001"), 5.1, "a delink changed the loss"),
        (status(), 5.102, "the export's loss is 5.1020, the status says 5.1"),
        (status(), float("nan"), "the export's loss is nan"),
    ],
)
def test_another_one_is_an_error(found: Any, exported: float, says: str) -> None:
    with pytest.raises(DevError, match=says):
        sentences(found, 1.75, exported)


def test_a_job_has_ended_when_a_condition_says_so() -> None:
    def job(kind: str, status: str) -> dict[str, Any]:
        return {
            "status": {
                "conditions": [{"type": "SuccessCriteriaMet", "status": "True"}, {"type": kind, "status": status}]
            }
        }

    assert end_of(None) is None
    assert end_of({"status": {}}) is None
    assert end_of(job("Failed", "False")) is None
    assert end_of(job("Failed", "True")) == "Failed"
    assert end_of(job("Complete", "True")) == "Complete"
