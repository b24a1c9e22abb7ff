"""Checkpoints of Muon: without second moments of matrices, through links and copies, and refused where AdamW would need
these moments."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.checkpoint.delink import delink
from pseudoreal_trainer.checkpoint.materialize import materialize
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.checkpoint.tensor_file import TensorFile
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.plan.units import KINDS

from tests.support.checkpoints import newest

UID = "11111111-2222"
MATRIX = "blocks.0.ffn.up.weight"
Train = Callable[[PhaseConfig], object]


@pytest.fixture
def saved(job_body: dict[str, Any], tmp_path: Path, config: Any, train: Train) -> Reader:
    """The last checkpoint of the first phase, whose layers share one block."""
    job_body["spec"]["optimizer"]["algorithm"] = "Muon"
    train(config(0))
    return newest(CheckpointStore(tmp_path / "work", UID), "pseudo")


def test_files_have_no_second_moments_of_matrices(saved: Reader) -> None:
    moments = TensorFile(saved.checkpoints / saved.manifest.data_folder / "moments-00000.safetensors")
    found = set(moments.names)
    assert {name for name in saved.names if f"{name}.first_moment" in found} == set(saved.names)
    lacking = {name for name in saved.names if f"{name}.second_moment" not in found}
    assert lacking == {name for name in saved.names if name.endswith(".weight") and ".attention." in name} | {
        name for name in saved.names if ".ffn." in name
    }
    assert not saved.tensor(MATRIX, "second_moment").any()


def test_a_delinked_and_materialized_checkpoint_has_the_moments_of_its_source(
    saved: Reader, delink_of: Any, tmp_path: Path
) -> None:
    delink(delink_of(1))
    target = newest(CheckpointStore(tmp_path / "work", UID), "real")
    folder = tmp_path / "plain" / target.manifest.name
    folder.mkdir(parents=True)
    plain = Reader(materialize(target, folder, lambda names, _: names), folder.parent)
    for name in target.names:
        assert plain.has_second_moment(name) == target.has_second_moment(name)
        for kind in KINDS:
            assert np.array_equal(plain.tensor(name, kind), target.tensor(name, kind))
    last = MATRIX.replace("0", "3")
    assert np.array_equal(target.tensor(last, "first_moment"), saved.tensor(MATRIX, "first_moment") / 4)


def test_a_whole_job_trains_both_phases_with_muon(
    job_body: dict[str, Any], train_job: Callable[[str], Any], tmp_path: Path
) -> None:
    job_body["spec"]["optimizer"]["algorithm"] = "Muon"
    train_job("work")
    reader = newest(CheckpointStore(tmp_path / "work", UID), "real")
    assert not reader.has_second_moment("blocks.3.ffn.up.weight")
    assert reader.has_second_moment("embedding.weight")
    assert reader.tensor("embedding.weight", "second_moment").any()


def test_adamw_does_not_continue_a_job_of_muon(job_body: dict[str, Any], config: Any, train: Train) -> None:
    job_body["spec"]["optimizer"]["algorithm"] = "Muon"
    train(config(0, "tiny-11111111"))
    job_body["metadata"]["uid"] = "22222222-3333"
    job_body["spec"]["checkpoint"]["continueFrom"] = "tiny-11111111"
    job_body["spec"]["optimizer"]["algorithm"] = "AdamW"
    with pytest.raises(InvalidJobError, match=r"algorithm is AdamW, but checkpoint .* Muon .*; set algorithm Muon"):
        train(config(0, "tiny-22222222"))
    job_body["spec"]["optimizer"]["algorithm"] = "Muon"
    job_body["spec"]["phases"][0]["until"] = {"step": 7}
    train(config(0, "tiny-22222222"))
