"""Batches of this data rank, handed to the engine one micro-batch at a time."""

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from pseudoreal_trainer.plan.memory.pinned_arena import MicroBatchShape
from pseudoreal_trainer.training.reading import Samples


@dataclass(frozen=True)
class StreamBatch:
    """Training samples of this data rank for one step."""

    samples: Samples
    parts: list[tuple[int, int]]
    """Half-open ranges of sample cursors [first, end), one per micro-batch."""

    def shape(self, micro_batch: int) -> MicroBatchShape:
        first, end = self.parts[micro_batch]
        return end - first, self.samples.sequence

    def tokens(self, micro_batch: int) -> Tensor:
        return _tokens(self.samples.windows(*self.parts[micro_batch]))


@dataclass(frozen=True)
class WindowBatch:
    """Validation windows. Each window is a micro-batch of its own, so its loss is independent of the other windows."""

    windows: list[NDArray[Any]]
    """Windows of [T + 1] tokens each."""

    def shape(self, micro_batch: int) -> MicroBatchShape:
        return 1, len(self.windows[micro_batch]) - 1

    def tokens(self, micro_batch: int) -> Tensor:
        return _tokens(self.windows[micro_batch][None])


def _tokens(windows: NDArray[Any]) -> Tensor:
    """Convert bytes or token ids [B, T + 1] to int64 token ids."""
    return torch.from_numpy(windows).to(torch.int64)
