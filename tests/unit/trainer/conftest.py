from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pseudoreal_api.resolved.config import DelinkConfig, PhaseConfig
from pseudoreal_api.resolved.resolve import delink_config, phase_config
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_trainer.checkpoint.delink import delink
from pseudoreal_trainer.data.token_corpus import open_corpus
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.training import validation
from pseudoreal_trainer.training.phase import train_phase

from tests.unit.trainer.engine.support.cases import Case
from tests.unit.trainer.engine.support.running import Result, run_wanted


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    # Of the module, as what several tests share is trained before the first of them.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text at the end of a phase takes longer than a small phase itself."""
    monkeypatch.setattr(validation, "SAMPLE_TOKENS", 1)


@pytest.fixture(scope="session")
def engine_results(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, list[Result]]:
    """Result of each rank of the cases that the files of this run want: the ranks of a world start once for all."""
    # Before any module's fixture: products of two threads have other bits than those of the reference.
    torch.set_num_threads(1)
    return run_wanted(tmp_path_factory.mktemp("engine"))


@pytest.fixture
def corpus_folder(tmp_path: Path) -> Path:
    """Two files of words drawn at random, about 12 kB."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    random = np.random.default_rng(7)
    words = ["and", "the", "of", "that", "lord", "king", "shall", "unto", "israel", "house", "came", "day."]
    for name in ("b.txt", "a.txt"):
        (folder / name).write_text(" ".join(random.choice(words, size=1200)))
    return folder


@pytest.fixture
def job_body(corpus_folder: Path) -> dict[str, Any]:
    """A small job of two phases in float64, on one rank and then on two; tests change what they need."""
    batch = {"sequences": 6, "microBatches": 2}
    return {
        "apiVersion": "pseudoreal.dev/v1alpha1",
        "kind": "PseudoRealJob",
        "metadata": {"name": "tiny", "uid": "11111111-2222"},
        "spec": {
            "model": {
                "layers": 4,
                "hiddenSize": 16,
                "attention": {"heads": 2},
                "sequenceLength": 16,
                "feedForward": {"size": 32},
            },
            "data": {
                "path": str(corpus_folder),
                "pattern": "*.txt",
                "validation": {"fraction": "0.1", "everySteps": 4},
            },
            "optimizer": {"learningRate": "0.01", "warmupSteps": 3},
            "precision": {"compute": "float64"},
            "phases": [
                {"name": "pseudo", "sharing": {"blocks": 1}, "until": {"step": 6}, "batch": batch},
                {"name": "real", "until": {"step": 12}, "workers": 2, "batch": batch},
            ],
            "checkpoint": {"everySteps": 5},
        },
    }


Configs = Callable[..., PhaseConfig]


@pytest.fixture
def config(job_body: dict[str, Any], tmp_path: Path) -> Configs:
    """Makes the configuration of a phase of the job as `job_body` stands when it is called."""

    def make(index: int = 0, work: str = "work", execution: int = 1) -> PhaseConfig:
        job = PseudoRealJob.from_object(job_body)
        offload = str(tmp_path / work / "offload")
        return phase_config(
            job, index, execution=execution, work_directory=str(tmp_path / work), offload_directory=offload
        )

    return make


@pytest.fixture
def delink_of(job_body: dict[str, Any], tmp_path: Path) -> Callable[..., DelinkConfig]:
    def make(index: int = 1, work: str = "work") -> DelinkConfig:
        job = PseudoRealJob.from_object(job_body)
        return delink_config(job, index, execution=1, work_directory=str(tmp_path / work))

    return make


@pytest.fixture
def train() -> Callable[..., Any]:
    """Trains a phase in this process, on one rank, whatever its workers."""

    def run(config: PhaseConfig, stop: Callable[[], bool] = lambda: False) -> Any:
        config = config.model_copy(update={"workers": 1})
        return train_phase(config, open_corpus(config), Ranks(0, 1, torch.device("cpu")), stop)

    return run


@pytest.fixture
def train_job(
    config: Configs, delink_of: Callable[..., DelinkConfig], train: Callable[..., Any]
) -> Callable[[str], Any]:
    """Trains the whole job in this process, on one rank; the result is the last phase's message."""

    def run(work: str) -> Any:
        train(config(0, work))
        delink(delink_of(1, work))
        return train(config(1, work))

    return run
