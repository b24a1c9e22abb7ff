"""Attention and MLPs with slices of their matrices (tensor parallelism; Megatron-LM, arXiv 1909.08053, section 3).

K tensor ranks divide the heads of attention and the hidden features of an MLP among them. They also divide the tokens:
outside of attention and MLPs, each rank computes its own tokens only (sequence parallelism; arXiv 2205.05198, section
4.2.2). Before the first matrices, a rank gathers the tokens of all tensor ranks. The product with the last matrix gives
summands of the outputs of all these tokens, and each rank receives the sums for its own tokens.

Embedding and head have slices of the vocabulary (`model.vocabulary`).

The tokens are cut as over context ranks (`model.context.ContextCut`). If C context ranks have K tensor ranks each, a
sequence is cut over C K ranks: the tokens of K neighbours are the part of one context rank, in its order.
"""

from typing import Protocol

from pseudoreal_api.spec.model import FeedForward, Model
from torch import Tensor


class TensorRanks(Protocol):
    """Exchanges with the ranks that have slices of the same matrices. Collective over these ranks."""

    @property
    def count(self) -> int: ...

    @property
    def rank(self) -> int:
        """Index of this rank's slices."""

    def gather(self, own: Tensor) -> Tensor:
        """Return the tokens of all tensor ranks for the tokens of this rank, with gradient: [B, L, H] -> [B, K L,
        H]."""

    def sum_to_own(self, summands: Tensor) -> Tensor:
        """Return the sum over the tensor ranks for this rank's tokens, with gradient: [B, K L, H] -> [B, L, H]."""

    def gather_values(self, own: Tensor) -> Tensor:
        """Return the same values as `gather`, without gradient."""

    def of_all(self, own: Tensor) -> Tensor:
        """Return the tensors of all tensor ranks, in their order, without gradient: [...] -> [K, ...]."""


def sliced_model(model: Model, tensor_ranks: TensorRanks | None) -> Model:
    """Return the model with a tensor rank's heads. If there are fewer key heads than ranks, each rank has all of
    them."""
    if tensor_ranks is None:
        return model
    keys, count = model.key_size // model.head_size, tensor_ranks.count
    attention = model.attention.model_copy(
        update={
            "heads": model.attention.heads // count,
            "key_value_heads": keys // count if keys % count == 0 else keys,
            "head_size": model.head_size,
        }
    )
    return model.model_copy(update={"attention": attention})


def sliced_mlp(mlp: FeedForward, tensor_ranks: TensorRanks | None) -> FeedForward:
    """Return the MLP with a tensor rank's hidden features."""
    return mlp if tensor_ranks is None else mlp.model_copy(update={"size": mlp.size // tensor_ranks.count})


def own_key_head(model: Model, tensor_ranks: TensorRanks | None) -> int | None:
    """Return the index of the key head of this rank's queries; None: the rank has no other key heads."""
    if tensor_ranks is None or (keys := model.key_size // model.head_size) % tensor_ranks.count == 0:
        return None
    return tensor_ranks.rank * keys // tensor_ranks.count
