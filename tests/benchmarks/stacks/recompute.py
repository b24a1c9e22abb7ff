"""Recomputing the blocks of the plain model in the backward pass."""

from typing import Any

from pseudoreal_trainer.model.transformer import Transformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Recomputed(nn.Module):
    """A block that keeps its input alone; there is no dropout whose random numbers would have to come back."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor, *others: Any) -> Tensor:
        """[B, T, H] -> [B, T, H]; `others` are those of the block."""
        out: Tensor = checkpoint(self.block, hidden, *others, use_reentrant=False, preserve_rng_state=False)
        return out


def recompute_blocks(model: Transformer) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = Recomputed(block)
