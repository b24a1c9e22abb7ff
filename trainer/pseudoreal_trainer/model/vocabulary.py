"""Embedding and head with slices of the vocabulary (tensor parallelism; Megatron-LM, arXiv 1909.08053, section 3).

Each of K tensor ranks has V / K rows of the matrices of embedding and head. It computes with the tokens of all K ranks:
the embedding of a token has values on one rank and zeros on the others, whose sum goes to the rank with the token. The
head's logits stay on the rank that computes them. Its loss needs two numbers of each rank and token: the log-sum-exp of
the rank's logits, and the logit of the target, which one rank has.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pseudoreal_trainer.model.tensor import TensorRanks


def embed(matrix: Tensor, tokens: Tensor, tensor_ranks: TensorRanks) -> Tensor:
    """Return the embeddings of this rank's tokens, [B, K L] -> [B, L, H]. `matrix`: this rank's rows, [V / K, H].
    `tokens`: ids of the tokens of all tensor ranks.

    If gradients are enabled, the result has a graph but no values, which nobody may read: the engine computes
    embeddings without gradients, and once more with gradients in the backward pass, which reads the graph only.
    """
    rows, is_own = _own_rows(tokens, len(matrix), tensor_ranks)
    summands = F.embedding(rows, matrix).masked_fill(~is_own[..., None], 0)  # [B, K L, H]
    if not torch.is_grad_enabled():
        return tensor_ranks.sum_to_own(summands)
    out: Tensor = _UnreadSumToOwn.apply(summands, tensor_ranks)
    return out


def log_sum_exp_and_target(logits: Tensor, targets: Tensor, tensor_ranks: TensorRanks) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of all logits of each token and the logit of its target, [c] each. `logits`: of this
    rank's rows, [c, V / K]. `targets`: [c]; a token whose target no rank has gets the logit 0.

    The gradients are those of this rank's logits. Collective over the tensor ranks.
    """
    log_sums, of_targets = _OverSlices.apply(logits, targets, tensor_ranks)
    return log_sums, of_targets


def _own_rows(tokens: Tensor, count: int, tensor_ranks: TensorRanks) -> tuple[Tensor, Tensor]:
    """Return two tensors with the shape of `tokens`: the row of each token in this rank's slice of the vocabulary, 0
    if the slice lacks the token; and whether the slice has the token. `count`: number of rows of a slice."""
    rows = tokens - tensor_ranks.rank * count
    is_own = (rows >= 0) & (rows < count)
    return rows.masked_fill(~is_own, 0), is_own


class _UnreadSumToOwn(torch.autograd.Function):
    """The graph of `TensorRanks.sum_to_own`, without its values: [B, K L, H] -> [B, L, H]."""

    @staticmethod
    def forward(ctx: Any, summands: Tensor, tensor_ranks: TensorRanks) -> Tensor:
        ctx.tensor_ranks = tensor_ranks
        batch, tokens, hidden = summands.shape
        return summands.new_empty(()).expand(batch, tokens // tensor_ranks.count, hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.tensor_ranks.gather_values(gradient), None


class _OverSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, tensor_ranks: TensorRanks) -> tuple[Tensor, Tensor]:
        rows, is_own = _own_rows(targets, logits.shape[1], tensor_ranks)
        of_target = logits.gather(1, rows[:, None])[:, 0].masked_fill(~is_own, 0)
        # In the order of the ranks, so that all of them get the same bits.
        of_all = tensor_ranks.of_all(torch.stack([logits.logsumexp(dim=-1), of_target]))  # [K, 2, c]
        log_sums = of_all[:, 0].logsumexp(dim=0)
        ctx.save_for_backward(logits, log_sums, rows, is_own)
        return log_sums, of_all[:, 1].sum(dim=0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_log_sums: Tensor, of_targets: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_sums, rows, is_own = ctx.saved_tensors
        gradient = (logits - log_sums[:, None]).exp_().mul_(of_log_sums[:, None])  # [c, V / K]
        gradient.scatter_add_(1, rows[:, None], of_targets.masked_fill(~is_own, 0)[:, None])
        return gradient, None, None
