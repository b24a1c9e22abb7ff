"""How tokens spread over experts in a step: what is reported, and how the balancing bias follows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pseudoreal_trainer.model.experts import Tally

NO_LOADS = torch.empty(0, 0, dtype=torch.float64)
"""[layers with experts, sums]: of a model without experts."""


def change_of_bias(counts: Tensor, rate: float) -> Tensor:
    """The change of the balancing bias of all experts of a block, [experts], float64, by the tokens that each one got
    in a step: `rate` up for those with fewer than the mean, down for those with more (Wang et al., arXiv 2408.15664,
    algorithm 1), less the mean of that, as TorchTitan has it. A shift of all biases chooses no other expert, but
    without this they would drift to where bfloat16 cannot tell them apart.

    counts [experts]: sums of whole numbers, which do not depend on the order in which ranks and micro-batches were
    added up.
    """
    tokens = counts.double()
    # Whole numbers on both sides: the mean itself would be rounded.
    signs = (tokens.sum() - len(tokens) * tokens).sign()
    return rate * (signs - signs.mean())


@dataclass(frozen=True)
class ExpertLoad:
    """How a step's tokens spread over the experts of all layers."""

    largest: float
    """Tokens of the expert with the most as a multiple of the mean over its layer's experts, in the layer where that is
    largest."""
    mean: float
    """The same in the mean over the layers."""
    idle: float
    """Share of all experts that no token chose."""
    dropped: float
    """Share of the choices that experts refused as they were full."""
    entropy: float
    """Entropy of the probabilities that routers give to experts, in nats, in the mean over tokens, prototypes and
    layers."""
    auxiliary_loss_sum: float
    """The auxiliary losses of all layers with their factor, summed over the tokens of the batch, in nats."""

    @classmethod
    def of(cls, sums: Sequence[float], layers: int) -> "ExpertLoad | None":
        """`sums`: of each layer with experts those of its tallies, as `Tally.sums` has them; layer after layer. None
        where no layer has any."""
        if not layers:
            return None
        width = len(sums) // layers
        rows = [sums[begin : begin + width] for begin in range(0, len(sums), width)]
        tokens = [row[: -Tally.OTHERS] for row in rows]
        refused, entropies, auxiliary_losses = zip(*(row[-Tally.OTHERS :] for row in rows), strict=True)
        choices = sum(map(sum, tokens))
        violations = [max(row) * len(row) / sum(row) for row in tokens]
        return cls(
            largest=max(violations),
            mean=sum(violations) / layers,
            idle=sum(count == 0 for row in tokens for count in row) / sum(map(len, tokens)),
            dropped=sum(refused) / choices,
            entropy=sum(entropies) / choices,
            auxiliary_loss_sum=sum(auxiliary_losses),
        )
