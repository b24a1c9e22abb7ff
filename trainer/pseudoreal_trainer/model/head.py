"""The two ends of the model: the embedding, and the final norm with the head."""

import torch
from pseudoreal_api.spec.model import Model as ModelSpec
from torch import Tensor, nn

from pseudoreal_trainer.model.layers import rms_norm


def _embedding(spec: ModelSpec) -> nn.Embedding:
    """Return an embedding with uninitialised weights, for the caller to set. torch's constructor would draw random
    weights; on the meta device this imports torch's compiler and takes seconds."""
    matrix = torch.empty(spec.vocabulary_size, spec.hidden_size)
    made: nn.Embedding = nn.Embedding.from_pretrained(matrix, freeze=False)
    return made


class Embedding(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embedding = _embedding(spec)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens' embeddings: [B, T] -> [B, T, H]."""
        hidden: Tensor = self.embedding(tokens)
        return hidden


class Head(nn.Module):
    """The final norm and an untied head. `model.loss` applies the norm to all tokens, and the head to chunks of
    tokens."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.norm = rms_norm(spec, spec.hidden_size)
        self.head = nn.Linear(spec.hidden_size, spec.vocabulary_size, bias=False)

    @property
    def matrix(self) -> Tensor:
        """The head's matrix, [V, H]."""
        return self.head.weight


class TiedEmbeddingHead(nn.Module):
    """The embedding and the final norm; the embedding's matrix is also the head's."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embedding = _embedding(spec)
        self.norm = rms_norm(spec, spec.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens' embeddings: [B, T] -> [B, T, H]."""
        hidden: Tensor = self.embedding(tokens)
        return hidden

    @property
    def matrix(self) -> Tensor:
        """The head's matrix, [V, H]."""
        return self.embedding.weight


def embedding_and_head(spec: ModelSpec) -> tuple[Embedding, Head] | tuple[TiedEmbeddingHead, TiedEmbeddingHead]:
    """Return the modules of the two ends; with tied embeddings the same module twice."""
    if spec.embeddings == "Separate":
        return Embedding(spec), Head(spec)
    ends = TiedEmbeddingHead(spec)
    return ends, ends


def logit_soft_cap(spec: ModelSpec) -> float | None:
    return None if spec.logit_soft_cap is None else float(spec.logit_soft_cap)


def apply_soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """Return logits between -cap and cap: cap tanh(logits / cap) (Gemma 2, arXiv 2408.00118, section 2). None:
    unchanged."""
    return logits if cap is None else cap * torch.tanh(logits / cap)
