"""A whole phase on a simulated GPU pins exactly as many host bytes as `pseudoreal plan` predicts."""

from typing import Any

import pytest
from pseudoreal_trainer.estimate.report import plan_phase

from tests.unit.trainer.engine.state.support.fake_memory import pretend_gpu


@pytest.mark.parametrize(("home", "activations"), [("Device", "Host"), ("Host", "Host"), ("Disk", "Device")])
def test_a_phase_pins_what_the_plan_says(
    home: str, activations: str, job_body: Any, config: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The phase also validates and writes asynchronous checkpoints."""
    job_body["spec"]["checkpoint"] |= {"everySteps": 2, "bufferBytes": "100003", "mode": "Async"}
    job_body["spec"]["precision"] = {"compute": "bfloat16"}
    job_body["spec"]["phases"][0] |= {"offload": {"home": home}, "activations": {"home": activations}}
    phase = config(0)
    planned = plan_phase(phase, "accelerator", None, threads=1).report.bytes
    memory = pretend_gpu(monkeypatch)
    assert train(phase).outcome == "Succeeded"
    assert memory.most == planned.pinned
    assert memory.pinned == 0
    assert (100_003 in memory.asked) == (home == "Device")
    assert planned.pinned <= planned.host
