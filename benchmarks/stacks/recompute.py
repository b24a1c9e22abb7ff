"""Recomputation of the plain model's blocks in the backward pass."""

from typing import Any

from pseudoreal_trainer.model.transformer import Transformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Recomputed(nn.Module):
    """A block that saves only its input. There is no dropout, so no random state has to be restored."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor, *others: Any) -> Tensor:
        """[B, T, H] -> [B, T, H]; `others` are the block's other arguments."""
        out: Tensor = checkpoint(self.block, hidden, *others, use_reentrant=False, preserve_rng_state=False)
        return out


def recompute_blocks(model: Transformer) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = Recomputed(block)
