"""This project's engine with expert parallelism over all ranks."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from pseudoreal_api.spec.phase import StateSharding
from torch import Tensor

from benchmarks.moe.beside.cases import Case, job
from benchmarks.moe.beside.stack import Stack
from benchmarks.moe.engines import engine_of, train_step


def sharded(sharding: StateSharding) -> Stack:
    """Return the stack with this sharding of the state of attention, routers, embedding and head."""

    def train(case: Case, batches: Tensor, rank: int, world: int) -> Iterator[Tensor]:
        with TemporaryDirectory() as folder, engine_of(job(case, sharding), Path(folder), rank, world) as engine:
            for step, sequences in enumerate(batches):
                # All ranks know the whole batch's loss, and the caller's mean over the ranks leaves it unchanged.
                yield torch.tensor(train_step(engine, sequences, step).loss_sum / sequences[:, 1:].numel())

    return train
