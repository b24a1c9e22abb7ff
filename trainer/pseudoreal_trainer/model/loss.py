"""Loss of a micro-batch, computed in chunks of tokens, so that the logits of all tokens are never in memory at once.

Each chunk runs forward through the head and then backward, and leaves the gradients of its features and of the head's
matrix (as in TorchTitan's ChunkedLossWrapper). The norm before the head is one pass over all tokens. If a micro-batch
is one chunk, the operations and their order are the same as in a plain backward pass.

If the head's matrix has a slice of the vocabulary, the chunks have the tokens of all K tensor ranks; each of these
ranks counts the K-th part of their loss sums.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor
from torch.nn import functional as F

from pseudoreal_trainer.model.head import Head, TiedEmbeddingHead, apply_soft_cap
from pseudoreal_trainer.model.tensor import TensorRanks
from pseudoreal_trainer.model.vocabulary import log_sum_exp_and_target
from pseudoreal_trainer.plan.sizes import loss_chunk_length

IGNORED = -100
"""Target of a token that is left out of the loss, as in `F.cross_entropy`."""

Take = Callable[[Tensor, Tensor], None]
"""Called with a parameter and a summand of its gradient. The summand has the parameter's shape and the compute
dtype."""


@dataclass(frozen=True)
class Losses:
    """Loss sums over tokens in nats. Each is a scalar in the dtype of the loss."""

    cross_entropy: Tensor
    z: Tensor | None
    """z-loss times its factor; None without z-loss."""

    @property
    def total(self) -> Tensor:
        return self.cross_entropy if self.z is None else self.cross_entropy + self.z

    def detach(self) -> "Losses":
        return Losses(self.cross_entropy.detach(), None if self.z is None else self.z.detach())

    def __truediv__(self, divisor: int) -> "Losses":
        return Losses(self.cross_entropy / divisor, None if self.z is None else self.z / divisor)

    def __add__(self, other: "Losses") -> "Losses":
        z = None if self.z is None or other.z is None else self.z + other.z
        return Losses(self.cross_entropy + other.cross_entropy, z)


@dataclass(frozen=True)
class Loss:
    """The loss function: cross-entropy, and z-loss if it has a factor, in chunks of tokens."""

    dtype: torch.dtype
    """Dtype in which the loss is computed and summed."""
    chunk: int | None = None
    """Maximum number of tokens in a chunk; None: one chunk."""
    soft_cap: float | None = None
    """Bound of the logits; None: no bound."""
    z_factor: float = 0.0
    """Factor of the z-loss, the sum of the squares of the logits' log-sum-exp (PaLM, arXiv 2204.02311, section 5)."""
    tensor_ranks: TensorRanks | None = None
    """Ranks with the other slices of the vocabulary; None: this rank has the whole vocabulary. With tensor ranks, all
    methods are collective over these ranks, targets are given for the tokens of all K ranks, [B, K T], and loss sums
    are the K-th part of the sum over these tokens."""

    @property
    def ranks(self) -> int:
        """Number of ranks that compute the loss of the same tokens, each with a slice of the vocabulary."""
        return 1 if self.tensor_ranks is None else self.tensor_ranks.count

    @torch.no_grad()
    def cross_entropy(self, head: Head | TiedEmbeddingHead, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy only, without gradients: hidden states [B, T, H], targets [B, T] -> sum over the
        tokens, a scalar."""
        features = self._gathered(head.norm(hidden)).flatten(0, 1)  # [N, H]
        sums = [
            self._cross_entropy(self._logits(part, head.matrix), wanted)[0]
            for part, wanted in zip(self._cut(features), self._cut(targets.flatten()), strict=True)
        ]
        return reduce(add, sums) / self.ranks

    @torch.no_grad()
    def logits(self, head: Head | TiedEmbeddingHead, hidden: Tensor) -> Tensor:
        """Return the logits of single tokens: hidden states [N, H] -> [N, V]. With slices of the vocabulary, one tensor
        rank has the hidden states; the others pass zeros."""
        features = head.norm(hidden)
        if self.tensor_ranks is None:
            return self._logits(features, head.matrix)
        own = self._logits(self.tensor_ranks.of_all(features).sum(dim=0), head.matrix)  # [N, V / K]
        return self.tensor_ranks.of_all(own).movedim(0, 1).flatten(1)

    def backward(
        self, head: Head | TiedEmbeddingHead, hidden: Tensor, targets: Tensor, divisor: float, take: Take
    ) -> tuple[Losses, Tensor]:
        """Return the loss sums over the tokens, and the gradient of total / `divisor` by the hidden states, [B, T, H].

        hidden [B, T, H], targets [B, T]. The gradients of the head's parameters go to `take` as they are computed.
        """
        hidden = hidden.detach().requires_grad_()
        features = head.norm(hidden)  # [B, T, H]
        # A chunk's features are not read after its own pass, so their gradient overwrites them. Contiguous, because the
        # chunks are views only then; gathered features may be a transposed view.
        parts = self._gathered(features.detach()).contiguous()
        losses = [
            self._backward_of_chunk(head.matrix, part, wanted, divisor, take)
            for part, wanted in zip(self._cut(parts.flatten(0, 1)), self._cut(targets.flatten()), strict=True)
        ]
        of_features = parts if self.tensor_ranks is None else self.tensor_ranks.sum_to_own(parts)
        of_hidden, of_norm = torch.autograd.grad(features, [hidden, head.norm.weight], of_features)
        take(head.norm.weight, of_norm)
        return reduce(add, losses) / self.ranks, of_hidden

    def _gathered(self, features: Tensor) -> Tensor:
        """Return the features of all tokens for which this rank has logits, without gradient: [B, T, H] -> [B, K T,
        H]; the same tensor if this rank has the whole vocabulary."""
        return features if self.tensor_ranks is None else self.tensor_ranks.gather_values(features)

    def _backward_of_chunk(self, matrix: Tensor, part: Tensor, targets: Tensor, divisor: float, take: Take) -> Losses:
        """Backpropagate one chunk and return its loss sums. `part`: features, [c, H], overwritten with their gradient.
        `targets`: [c]."""
        features = part.detach().requires_grad_()
        losses = self._of_chunk(features, matrix, targets)
        of_features, of_matrix = torch.autograd.grad(losses.total / divisor, [features, matrix])
        part.copy_(of_features)
        take(matrix, of_matrix)
        return losses.detach()

    def _of_chunk(self, features: Tensor, matrix: Tensor, targets: Tensor) -> Losses:
        """Return the loss sums over a chunk's tokens: features [c, H], the head's matrix [V, H], targets [c]."""
        logits = self._logits(features, matrix)
        cross_entropy, log_sums = self._cross_entropy(logits, targets)
        if not self.z_factor:
            return Losses(cross_entropy, None)
        counted = (targets != IGNORED).to(self.dtype)  # [c]
        log_sums = logits.logsumexp(dim=-1) if log_sums is None else log_sums
        return Losses(cross_entropy, self.z_factor * (counted * log_sums.square()).sum())

    def _cross_entropy(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the sum of the cross-entropy over a chunk's tokens, and with slices of the vocabulary the log-sum-exp
        of the logits of each token: logits [c, V or V / K], targets [c] -> scalar, [c]."""
        if self.tensor_ranks is None:
            return F.cross_entropy(logits, targets, reduction="sum"), None
        log_sums, of_targets = log_sum_exp_and_target(logits, targets, self.tensor_ranks)
        return (log_sums - of_targets).masked_fill(targets == IGNORED, 0).sum(), log_sums

    def _logits(self, features: Tensor, matrix: Tensor) -> Tensor:
        """Return the logits of a chunk in the dtype of the loss: [c, H] -> [c, V or V / K]."""
        return apply_soft_cap(F.linear(features, matrix).to(self.dtype), self.soft_cap)

    def _cut(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Return the chunks of a tensor with one entry per token, [N, ...]; without tokens, one empty chunk."""
        return torch.split(tokens, loss_chunk_length(len(tokens), self.chunk))


def sum_of(losses: Sequence[Losses]) -> Losses:
    """Return the loss sums of several micro-batches together."""
    z = [one.z for one in losses if one.z is not None]
    return Losses(torch.stack([one.cross_entropy for one in losses]).sum(), torch.stack(z).sum() if z else None)
