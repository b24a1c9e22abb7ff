"""Delink from shared experts, spread over some ranks, to each layer's own experts, spread over others."""

import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.checkpoint.delink import delink
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.data.token_corpus import open_corpus
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.plan.units import KINDS
from pseudoreal_trainer.training.phase import train_phase

from tests.support.checkpoints import newest
from tests.support.forked import run_ranks

EXPERTS = {"count": 8, "prototypes": 2}
BATCH = {"sequences": 8, "microBatches": 2}
OVER_FOUR = {"workers": 4, "parallelism": {"expertRanks": 4, "stateSharding": "Full"}}
OVER_TWO = {"workers": 4, "parallelism": {"pipeline": 2, "expertRanks": 2, "stateSharding": "None", "schedule": "1F1B"}}


def _train(rank: int, world: int, config: PhaseConfig) -> None:
    train_phase(config, open_corpus(config), Ranks(rank, world, torch.device("cpu")), lambda: False)


def _run(config: PhaseConfig) -> None:
    if config.ranks == 1:
        _train(0, 1, config)
    else:
        run_ranks(_train, config.ranks, config.ranks, config)


def _digests(work: Path) -> dict[str, str]:
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in sorted(work.rglob("*pseudo*/*"))}


def _end(work: Path) -> Reader:
    return newest(CheckpointStore(work, "11111111-2222"), "real")


@pytest.mark.parametrize(
    "sharing",
    [
        pytest.param({"blocks": 1}, id="blocks", marks=pytest.mark.long),
        pytest.param({"blocks": 1, "parts": ["Experts"]}, id="experts"),
    ],
)
def test_spread_experts_are_delinked_to_another_spread(
    sharing: Any, job_body: Any, config: Any, delink_of: Any, tmp_path: Path
) -> None:
    pseudo, real = job_body["spec"]["phases"]
    job_body["spec"]["model"]["experts"] = EXPERTS
    pseudo.update(OVER_FOUR, sharing=sharing, batch=BATCH)
    real.update(batch=BATCH, until={"step": 7})
    _run(config(0))
    before = _digests(tmp_path / "work")
    assert len(before) > 4, "every rank has written"
    delink(delink_of(1))
    assert _digests(tmp_path / "work") == before, "a delink links"
    shutil.copytree(tmp_path / "work", tmp_path / "alone")
    for work, layout in (("work", OVER_TWO), ("alone", {"workers": 1})):
        job_body["spec"]["phases"][1] = real | layout
        _run(config(1, work))
    found, expected = _end(tmp_path / "work"), _end(tmp_path / "alone")
    assert found.manifest.step == expected.manifest.step == 7
    assert found.manifest.loss == pytest.approx(expected.manifest.loss, rel=1e-12)
    for kind in KINDS:
        for name, whole in expected.whole(kind).items():
            np.testing.assert_allclose(found.tensor(name, kind), whole, rtol=0, atol=1e-12)
