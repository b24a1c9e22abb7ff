"""Select the stack of a case."""

from pathlib import Path
from typing import Protocol

import torch
from pseudoreal_api.spec.model import Model
from torch import Tensor

from benchmarks.gpu.cases import Case
from benchmarks.gpu.ours import Ours
from benchmarks.gpu.theirs import FullyShard


class Trainer(Protocol):
    def train(self, batch: Tensor, micro_batches: int) -> float:
        """Train one step on [sequences, T + 1]; return the batch's mean loss in nats per token, before the update."""

    def settle(self) -> None:
        """Wait for work that still runs."""

    def pinned_bytes(self) -> int:
        """Return the host bytes that the stack pins now outside of torch's allocator."""

    def close(self) -> None: ...


def trainer_of(case: Case, model: Model, device: torch.device, folder: Path) -> Trainer:
    """Return the trainer of the case. `folder` is for the home disk."""
    return Ours(case, model, device, folder) if case.stack == "pseudoreal" else FullyShard(case, model, device)
