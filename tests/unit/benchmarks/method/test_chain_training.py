"""A chain of jobs, each of which continues the one before, trains the weights of one uninterrupted job."""

import json
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.resolved.resolve import delink_config, phase_config
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_trainer.checkpoint.delink import delink
from pseudoreal_trainer.checkpoint.store import store_of
from pseudoreal_trainer.data.token_corpus import open_corpus
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.training import validation
from pseudoreal_trainer.training.phase import train_phase

from benchmarks.method.arms import ARMS
from benchmarks.method.chain import Link, Run, decays
from benchmarks.method.training import Place, Trained, train
from tests.unit.benchmarks.method.support.tiny import random_texts, scale_of_steps

_STEPS = 10
_PHASES: tuple[tuple[int, dict[str, Any]], ...] = ((3, {"sharing": {"blocks": 1}}), (_STEPS, {}))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return random_texts(tmp_path_factory.mktemp("chain"))


def _run(rate: float = 0.01) -> Run:
    arm = next(arm for arm in ARMS["dense"] if arm.name == "delinked at 30 %")
    return Run("dense", arm, 16, seed=5, rate=rate, text="text", scale=scale_of_steps("dense", _STEPS))


@pytest.fixture(scope="module")
def decay(place: Place) -> Link:
    """The decay of the full budget, trained after its trunk."""
    found = decays(_run(), (1.0,))[0]
    for link in found.ancestry():
        train(link, place)
    return found


def test_a_chain_trains_the_weights_of_one_job(
    decay: Link, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chain delinks in its second job, and decays in its third. The other job is written by hand."""
    monkeypatch.setattr(validation, "SAMPLE_TOKENS", 1)
    jobs = [(link.begin, link.end, len(link.stages)) for link in decay.ancestry()]
    assert jobs == [(0, 3, 1), (3, 8, 2), (8, 10, 1)]
    whole = _uninterrupted(place.data(decay), tmp_path)
    chained = _weights(_config(decay.job(place.data(decay)), 0, place.folder(decay)))
    assert {*chained} == {*whole}
    for name, values in whole.items():
        np.testing.assert_array_equal(chained[name], values, err_msg=name)


def _uninterrupted(data: str, folder: Path) -> dict[str, NDArray[Any]]:
    batch = {"batch": {"sequences": 4}, "activations": {"keep": "All"}}
    phases = [
        {"name": f"phase{index}", "until": {"step": end}, **batch, **more} for index, (end, more) in enumerate(_PHASES)
    ]
    spec = {
        "model": {
            "layers": 12,
            "hiddenSize": 16,
            "vocabularySize": 128,
            "embeddings": "Tied",
            "attention": {"heads": 2},
            "sequenceLength": 16,
            "feedForward": {"size": 64},
        },
        "data": {
            "path": data,
            "seed": 5,
            "sources": [{"name": "text", "path": f"{data}/train"}],
            "validation": {"everySteps": 1000, "sequences": 1, "sets": [{"name": "v", "path": f"{data}/validation"}]},
        },
        # A warm-up of one step; 2 of the 9 steps after it decay.
        "optimizer": {
            "learningRate": "0.01",
            "warmupSteps": 1,
            "schedule": "WarmupStableDecay",
            "decayFraction": f"{2 / 9:.9f}",
            "finalFraction": "0",
        },
        "precision": {"compute": "float32"},
        "phases": phases,
        "checkpoint": {"everySteps": 1000, "mode": "Sync"},
    }
    metadata = {"name": "one", "uid": "1234-5"}
    body = {"apiVersion": "pseudoreal.dev/v1alpha1", "kind": "PseudoRealJob", "metadata": metadata, "spec": spec}
    job = PseudoRealJob.from_object(body)
    for index in range(len(phases)):
        if index:
            delink(delink_config(job, index, execution=1, work_directory=str(folder)))
        config = _config(job, index, folder)
        torch.set_num_threads(1)
        train_phase(config, open_corpus(config), Ranks(0, 1, torch.device("cpu")), lambda: False)
    return _weights(config)


def _config(job: PseudoRealJob, index: int, folder: Path) -> PhaseConfig:
    return phase_config(job, index, execution=1, work_directory=str(folder), offload_directory=str(folder / "offload"))


def _weights(config: PhaseConfig) -> dict[str, NDArray[Any]]:
    store = store_of(config)
    return dict(store.reader(store.whole(store.committed(config.phase)[-1])).whole())


def test_the_record_has_the_loss_of_all_windows(decay: Link, place: Place) -> None:
    """Random tokens cannot be predicted better than by their frequency, which is the same for 99 of them."""
    found = place.known(decay)
    assert found is not None
    assert (found.steps, found.validation_tokens, found.device) == (2, 500 // 16 * 16, "cpu")
    assert found.loss == pytest.approx(np.log(99), abs=0.5)
    assert found.peak_bytes > 0
    assert [one.loss for one in map(place.known, decay.ancestry()[:-1]) if one] == [None, None]


def test_a_training_that_diverges_is_recorded(place: Place) -> None:
    """A rate beyond all measure makes weights infinite within some steps."""
    first, second, last = decays(_run(rate=1e30), (1.0,))[0].ancestry()
    assert train(first, place).has_diverged
    train(second, place)
    found = train(last, place)
    assert found.loss is not None
    assert isnan(found.loss)
    assert json.loads((place.folder(last) / "trained.json").read_text())["has_diverged"]
    assert Trained.model_validate_json((place.folder(last) / "trained.json").read_bytes()).has_diverged


def test_a_training_that_fails_otherwise_ends_the_trials_with_its_log(place: Place) -> None:
    missing = replace(_run(), text="missing")
    with pytest.raises(RuntimeError, match=r"delinked at 30 %, seed 5.*ended with exit code 1(.|\n)*index\.json"):
        train(decays(missing, (1.0,))[0].ancestry()[0], place)
