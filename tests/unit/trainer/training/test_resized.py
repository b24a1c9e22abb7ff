"""An elastic phase that changes its number of workers computes the same as a phase that always has all workers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.resolved.elastic import resized
from pseudoreal_api.resolved.resolve import phase_config
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.data.token_corpus import open_corpus
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.plan.units import KINDS
from pseudoreal_trainer.training.phase import train_phase

from tests.support.forked import run_ranks

STEPS = 5
ELASTIC = {"workers": 3, "elastic": {"minWorkers": 1}, "batch": {"sequences": 24, "microBatches": 2}}
LAYOUTS = {
    "shards": {},  # stateSharding as it is filled: Full with two or three data ranks, None with one
    "pipelines of all ranks": {
        "parallelism": {"pipeline": "AllRanks", "schedule": "1F1B"},
        "offload": {"home": "Host"},
    },
}


def _rank(rank: int, world: int, config: PhaseConfig, stops: bool) -> None:
    train_phase(config, open_corpus(config), Ranks(rank, world, torch.device("cpu")), lambda: stops)


def _train(config: PhaseConfig, *, stops: bool = False) -> None:
    """Train to the end, or a single step if `stops`."""
    run_ranks(_rank, config.ranks, config.ranks, config, stops)


def _losses(config: PhaseConfig) -> list[float]:
    lines = (Path(config.work_directory) / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines)]


def _newest(config: PhaseConfig) -> Reader:
    found = CheckpointStore(Path(config.work_directory), config.job.uid).newest(config.phase)
    assert found is not None
    return found


@pytest.mark.parametrize("layout", ["shards", pytest.param("pipelines of all ranks", marks=pytest.mark.long)])
def test_losses_and_weights_of_a_resized_phase_equal_an_undisturbed_phase(
    layout: str, job_body: dict[str, Any], tmp_path: Path
) -> None:
    spec = job_body["spec"]
    spec["phases"] = [spec["phases"][0] | ELASTIC | LAYOUTS[layout] | {"until": {"step": STEPS}}]
    job = PseudoRealJob.from_object(job_body)

    def config(work: str, workers: int, execution: int = 1) -> PhaseConfig:
        sized = job.model_copy(update={"spec": resized(job.spec, 0, workers)})
        folder, disk = str(tmp_path / work), str(tmp_path / work / "offload")
        return phase_config(sized, 0, execution=execution, work_directory=folder, offload_directory=disk)

    _train(config("whole", 3))
    sizes = [3, 1, 2]
    for execution, workers in enumerate(sizes, 1):
        _train(config("changing", workers, execution), stops=True)
    assert len(_losses(config("changing", 3))) == len(sizes), "one step on each number of workers"
    _train(config("changing", 3, len(sizes) + 1))
    whole, changing = config("whole", 3), config("changing", 3)
    assert len(_losses(whole)) == STEPS
    assert _losses(changing) == pytest.approx(_losses(whole), rel=0, abs=1e-12)
    for kind in KINDS:
        for name, array in _newest(whole).whole(kind).items():
            np.testing.assert_allclose(_newest(changing).tensor(name, kind), array, rtol=0, atol=1e-12)
