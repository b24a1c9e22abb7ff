"""Experts of one layer that exceed the device budget are rejected as one unit and train as groups."""

from collections.abc import Callable
from typing import Any

import pytest
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.estimate.report import plan_phase
from pseudoreal_trainer.plan.memory.from_config import phase_layout
from pseudoreal_trainer.plan.units import units_of

from tests.support.checkpoints import metrics, newest_of

GROUPS = 16


def _configured(
    job_body: dict[str, Any], config: Callable[..., PhaseConfig], name: str, offload: dict[str, Any]
) -> PhaseConfig:
    spec = job_body["spec"]
    spec["model"] |= {"layers": 2, "experts": {"count": 32, "prototypes": 2}, "feedForward": {"size": 64}}
    spec["data"]["validation"] |= {"sequences": 4, "everySteps": 100}
    spec["phases"] = [
        {"name": "real", "until": {"step": 2}, "batch": {"sequences": 4, "microBatches": 2}, "offload": offload}
    ]
    return config(0, name)


def test_experts_that_are_larger_than_the_device_train_in_groups(
    job_body: dict[str, Any], config: Callable[..., PhaseConfig], train: Any
) -> None:
    whole = _configured(job_body, config, "whole", {})
    experts = next(unit for unit in units_of(whole.model, whole.sharing) if unit.is_experts)
    # In float64, not even the working copy of one layer's experts fits into the budget.
    budget = {"budget": {"device": experts.numel * 8 - 1}, "window": 1}
    refused = _configured(job_body, config, "refused", budget)
    with pytest.raises(InvalidJobError, match=r"cut experts into groups \(offload\.expertGroups\)"):
        phase_layout(refused, "cpu")
    in_groups = _configured(job_body, config, "groups", budget | {"expertGroups": GROUPS})
    report = plan_phase(in_groups, "cpu", None, threads=1).report
    assert report.fits
    assert report.peak_device_bytes < experts.numel * 8
    assert report.homes[f"blocks.0.experts, group {GROUPS - 1}"] == "Host"
    assert f"are {GROUPS} units" in report.hints[0]

    assert train(whole).outcome == train(in_groups).outcome == "Succeeded"
    losses = [[line["loss"] for line in metrics(phase)] for phase in (whole, in_groups)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    assert {*newest_of(in_groups).names} == {*newest_of(whole).names}
