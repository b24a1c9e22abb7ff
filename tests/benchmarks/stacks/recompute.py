"""Recomputing the blocks of the plain model in the backward pass."""

from pseudoreal_trainer.model.transformer import Transformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Recomputed(nn.Module):
    """A block that keeps its input alone; there is no dropout whose random numbers would have to come back."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """[B, T, H] -> [B, T, H]"""
        out: Tensor = checkpoint(self.block, hidden, rotation, mask, use_reentrant=False, preserve_rng_state=False)
        return out


def recompute_blocks(model: Transformer) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = Recomputed(block)
