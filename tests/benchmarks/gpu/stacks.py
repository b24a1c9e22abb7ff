"""The stack of a case."""

from pathlib import Path
from typing import Protocol

import torch
from pseudoreal_api.spec.model import Model
from torch import Tensor

from tests.benchmarks.gpu.cases import Case
from tests.benchmarks.gpu.ours import Ours
from tests.benchmarks.gpu.theirs import FullyShard


class Trainer(Protocol):
    def train(self, batch: Tensor, micro_batches: int) -> float:
        """One step. [sequences, T + 1] -> the mean loss over the batch, nats per token, before the update."""

    def settle(self) -> None:
        """Waits for what still goes on."""

    def pinned_bytes(self) -> int:
        """Bytes of host memory that the stack has pinned now, besides what comes from torch's allocator."""

    def close(self) -> None: ...


def trainer_of(case: Case, model: Model, device: torch.device, folder: Path) -> Trainer:
    """`folder`: for the home disk."""
    return Ours(case, model, device, folder) if case.stack == "pseudoreal" else FullyShard(case, model, device)
