"""Phases with non-finite losses or gradients: no such value reaches a checkpoint, whatever
`optimizer.nonFinite` says."""

import re
from itertools import count
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pseudoreal_trainer.checkpoint.delink import delink
from pseudoreal_trainer.checkpoint.manifest import Updates
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.data.corpus import CorpusIdentity
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.plan.units import KINDS
from pseudoreal_trainer.training.progress import Progress
from pseudoreal_trainer.training.schedule import EndConditions
from pseudoreal_trainer.training.validation import Validation

from tests.support.checkpoints import metrics
from tests.support.forked import run_ranks
from tests.unit.trainer.training.support import spoiling
from tests.unit.trainer.training.support.spoiling import spoilt

CORPUS = CorpusIdentity(files=1, size=5, sha256="07" * 32)
CLIPPINGS = ("Global", "PerUnit", "None")
SPOILT = 3
"""The step whose gradients are made non-finite."""
SAYS = {
    "Global": r"the gradient norm of step 3 is (nan|inf); lower spec.optimizer.learningRate or raise warmupSteps",
    "PerUnit": r"the gradient of blocks.0 is not finite in step 3; lower spec.optimizer.learningRate or raise",
    "None": r"the gradient of blocks.0 is not finite in step 3; lower spec.optimizer.learningRate or raise",
}


def _store(config: Any) -> CheckpointStore:
    return CheckpointStore(Path(config.work_directory), config.job.uid)


def _checkpoints(config: Any) -> list[Reader]:
    store = _store(config)
    return [store.reader(manifest) for manifest in store.committed()]


def _assert_finite(config: Any) -> None:
    for reader in _checkpoints(config):
        assert "null" not in (Path(str(reader.checkpoints)) / reader.manifest.name / "manifest.json").read_text()
        for kind in KINDS:
            for name, array in reader.whole(kind).items():
                assert np.isfinite(array).all(), f"{reader.manifest.name}: {kind} of {name}"


def _set(job_body: Any, clipping: str, home: str = "Device", **optimizer: Any) -> None:
    job_body["spec"]["optimizer"] |= {"clipping": {"mode": clipping}, **optimizer}
    job_body["spec"]["phases"][0] |= {"offload": {"home": home}, "sharing": {"blocks": 4}}
    job_body["spec"]["checkpoint"]["everySteps"] = 1


@pytest.mark.parametrize("home", ["Device", "Host", "Disk"])
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_a_phase_that_must_fail_saves_nothing_that_is_not_finite(
    clipping: str, home: str, job_body: Any, config: Any, train: Any
) -> None:
    _set(job_body, clipping, home)
    with spoilt({SPOILT}, inf if home == "Host" else nan), pytest.raises(TrainingError, match=SAYS[clipping]):
        train(config(0))
    _assert_finite(config(0))
    assert [reader.manifest.step for reader in _checkpoints(config(0))][-1:] == [SPOILT - 1]


@pytest.mark.parametrize("layout", ["data", "pipeline"])
@pytest.mark.parametrize(("clipping", "home"), [("Global", "Host"), ("PerUnit", "Disk"), ("None", "Device")])
def test_ranks_that_must_fail_save_nothing_that_is_not_finite(
    clipping: str, home: str, layout: str, job_body: Any, config: Any, tmp_path: Path
) -> None:
    _set(job_body, clipping, home)
    dimensions = {"data": {"stateSharding": "Full"}, "pipeline": {"pipeline": 2}}[layout]
    job_body["spec"]["phases"][0] |= {"workers": 2, "parallelism": dimensions}
    job_body["spec"]["phases"][0]["until"]["step"] = SPOILT
    run_ranks(spoiling.rank, 2, config(0), SPOILT, tmp_path)
    said = [(tmp_path / f"{number}").read_text() for number in range(2)]
    assert any(re.search(SAYS[clipping], text) for text in said), said
    _assert_finite(config(0))


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_a_phase_that_skips_ends_as_one_that_was_stopped_behind_the_skipped_step(
    clipping: str, job_body: Any, config: Any, train: Any
) -> None:
    """Each unit keeps its own count of updates, from which AdamW's bias correction follows."""
    _set(job_body, clipping, nonFinite="Skip")
    whole, parts, calls = config(0, "whole"), config(0, "parts"), count(1)
    with spoilt({SPOILT}):
        train(whole)
        train(parts, stop=lambda: next(calls) == SPOILT)
        train(parts)
    _assert_finite(whole)
    one, other = (_checkpoints(found)[-1] for found in (whole, parts))
    assert (
        one.manifest.updates
        == other.manifest.updates
        == (
            Updates(others=5, blocks=5)
            if clipping == "Global"
            else Updates(others=6, blocks=6, left_out={"blocks.0": 1})
        )
    )
    assert one.updates("blocks.0.attention_norm.weight") == 5
    assert one.updates("norm.weight") == (5 if clipping == "Global" else 6)
    for kind in KINDS:
        for name, array in one.whole(kind).items():
            assert np.array_equal(other.tensor(name, kind), array), name
    for found in (whole, parts):
        assert [line["skipped_steps"] for line in metrics(found)] == [0, 0, 1, 1, 1, 1]
        assert [line["global_cursor"] for line in metrics(found)] == [6, 12, 18, 24, 30, 36]
    assert (one.manifest.skipped.steps, one.manifest.skipped.in_a_row) == (1, 0)


@pytest.mark.parametrize(("state", "left_out"), [("Copy", {f"blocks.{block}": 1 for block in (0, 2)}), ("Reset", {})])
def test_a_delink_gives_each_block_the_count_of_the_one_that_it_comes_from(
    state: str, left_out: dict[str, int], job_body: Any, config: Any, train: Any, delink_of: Any
) -> None:
    _set(job_body, "PerUnit", nonFinite="Skip")
    job_body["spec"]["phases"][0]["sharing"] = {"blocks": 2}
    job_body["spec"]["delink"] = {"optimizerState": state}
    with spoilt({SPOILT}):
        train(config(0))
    delink(delink_of(1))
    assert _checkpoints(config(1))[-1].manifest.updates == Updates(
        others=6, blocks=6 if state == "Copy" else 0, left_out=left_out
    )


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_ten_skipped_steps_in_a_row_are_too_many(clipping: str, job_body: Any, config: Any, train: Any) -> None:
    _set(job_body, clipping, nonFinite="Skip")
    job_body["spec"]["phases"][0]["until"]["step"] = 40
    job_body["spec"]["phases"][1]["until"]["step"] = 50
    says = r"updates of 10 steps in a row were left out, .* of step 21 .*lower spec.optimizer.learningRate"
    with spoilt(lambda step: 2 <= step <= 10 or step > 11), pytest.raises(TrainingError, match=says):
        train(config(0))
    assert _checkpoints(config(0))[-1].manifest.skipped.steps == 9 + 9
    _assert_finite(config(0))


def test_a_validation_loss_that_is_not_finite_ends_the_phase(
    job_body: Any, config: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_body["spec"]["phases"][0]["until"]["validationLoss"] = "1.5"
    losses = iter([4.0, nan])
    monkeypatch.setattr(Validation, "measure", lambda *_: next(losses))
    with pytest.raises(TrainingError, match=r"the validation loss is nan; lower spec.optimizer.learningRate"):
        train(config(0))


def test_a_loss_that_is_no_number_is_not_reached(job_body: Any, config: Any) -> None:
    job_body["spec"]["phases"][0]["until"]["validationLoss"] = "1.5"
    assert EndConditions(config(0)).after_loss(Progress(step=3, validation_loss=nan)).step is None


@pytest.mark.parametrize("field", ["loss", "validation_loss", "start_validation_loss"])
def test_no_manifest_says_a_number_that_is_not_finite(field: str, config: Any) -> None:
    progress = Progress()
    assert progress.manifest(config(0), CORPUS).to_json()
    setattr(progress, field, nan)
    with pytest.raises(ValueError, match="pseudo-00000000 has a number that is not finite"):
        progress.manifest(config(0), CORPUS).to_json()
