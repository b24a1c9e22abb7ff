"""This project's engine, configured by a job."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.resolved.resolve import phase_config
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_trainer.checkpoint.origin import Anew
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.gradients import Agreement
from pseudoreal_trainer.engine.passes import Training
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.plan.memory.from_config import phase_layout
from pseudoreal_trainer.training.start import fill, open_engine
from torch import Tensor

from benchmarks.work import LEARNING_RATE, Batch


@contextmanager
def engine_of(body: PseudoRealJob, folder: Path, rank: int = 0, world: int = 1) -> Iterator[Engine]:
    """Yield one rank's engine with the job's initial weights. `folder` is for state with home Disk."""
    config = config_of(body, folder)
    with open_engine(config, phase_layout(config, "cpu"), Ranks(rank, world, torch.device("cpu"))) as engine:
        fill(engine, config, Anew())
        yield engine


def config_of(body: PseudoRealJob, folder: Path) -> PhaseConfig:
    return phase_config(body, 0, execution=1, work_directory=str(folder), offload_directory=str(folder / "offload"))


def train_step(engine: Engine, sequences: Tensor, step: int) -> Agreement:
    """Train one step on the sequences of all ranks, [sequences, T + 1]."""
    layout = engine.groups.layout
    parts = sequences.chunk(layout.data)[engine.groups.data_rank].chunk(layout.micro_batches)
    return engine.train(Batch(parts), Training(sequences[:, 1:].numel(), LEARNING_RATE, stop=False), step)
