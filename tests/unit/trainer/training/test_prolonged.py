"""A phase whose `until` was raised continues from the checkpoint that completed the phase."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.plan.units import KINDS

TOKENS_OF_A_STEP = 6 * 16


@pytest.fixture
def phase(job_body: dict[str, Any]) -> dict[str, Any]:
    """Return the only phase of a job whose learning rate does not depend on the job's length."""
    spec = job_body["spec"]
    spec["optimizer"]["schedule"] = "Constant"
    del spec["phases"][1:]
    only: dict[str, Any] = spec["phases"][0]
    return only


def _newest(config: PhaseConfig) -> Reader:
    found = CheckpointStore(Path(config.work_directory), config.job.uid).newest(config.phase)
    assert found is not None
    return found


def _losses(config: PhaseConfig) -> list[tuple[int, float]]:
    lines = (Path(config.work_directory) / "metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["loss"]) for line in map(json.loads, lines)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"step": 6}, {"step": 11}),
        ({"tokens": 6 * TOKENS_OF_A_STEP}, {"tokens": 11 * TOKENS_OF_A_STEP}),
        ({"step": 6, "tokens": 9 * TOKENS_OF_A_STEP}, {"step": 11, "tokens": 20 * TOKENS_OF_A_STEP}),
    ],
)
def test_a_prolonged_phase_ends_like_one_that_had_its_length_from_the_start(
    before: Any, after: Any, phase: dict[str, Any], config: Any, train: Any
) -> None:
    phase["until"] = before
    assert train(config(0, "prolonged")).step == 6
    phase["until"] = after
    whole, prolonged = config(0, "whole"), config(0, "prolonged", execution=2)
    expected, found = train(whole), train(prolonged)
    assert (found.outcome, found.step, found.tokens) == ("Succeeded", 11, 11 * TOKENS_OF_A_STEP)
    assert (found.loss, found.validation_loss) == (expected.loss, expected.validation_loss)
    assert _losses(prolonged) == _losses(whole)
    one, other = _newest(whole), _newest(prolonged)
    assert other.manifest.phase_complete
    for kind in KINDS:
        assert all(np.array_equal(one.tensor(name, kind), other.tensor(name, kind)) for name in one.names), kind


def test_a_phase_that_its_loss_has_ended_stays_as_it_is(phase: dict[str, Any], config: Any, train: Any) -> None:
    phase["until"] = {"step": 10, "validationLoss": "5.0"}
    ended = train(config(0))
    assert ended.step == 4, "the first validation is at step 4"
    phase["until"]["step"] = 20
    assert train(config(0, execution=2)) == ended.model_copy(update={"execution": 2})
