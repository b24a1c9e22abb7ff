"""The samples of this rank, as the engine asks for them: micro-batch by micro-batch."""

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from pseudoreal_trainer.forecast.memory.crossing import Shape
from pseudoreal_trainer.training.reading import Samples


@dataclass(frozen=True)
class StreamBatch:
    """This data rank's windows of a training step."""

    samples: Samples
    parts: list[tuple[int, int]]
    """Cursors [first, end) of each micro-batch."""

    def shape(self, micro_batch: int) -> Shape:
        first, end = self.parts[micro_batch]
        return end - first, self.samples.sequence

    def tokens(self, micro_batch: int) -> Tensor:
        return _tokens(self.samples.windows(*self.parts[micro_batch]))


@dataclass(frozen=True)
class WindowBatch:
    """Windows that are evaluated one by one."""

    windows: list[NDArray[Any]]
    """The windows, [T + 1] each."""

    def shape(self, micro_batch: int) -> Shape:
        return 1, len(self.windows[micro_batch]) - 1

    def tokens(self, micro_batch: int) -> Tensor:
        return _tokens(self.windows[micro_batch][None])


def _tokens(windows: NDArray[Any]) -> Tensor:
    """Bytes or token ids [B, T + 1] -> token ids, int64."""
    return torch.from_numpy(windows).to(torch.int64)
