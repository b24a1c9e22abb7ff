"""The two ends of the model: the embedding, and the final norm with the head."""

import torch
from pseudoreal_api.spec.model import Model as ModelSpec
from torch import Tensor, nn

from pseudoreal_trainer.model.norm import norm


def _embedding(spec: ModelSpec) -> nn.Embedding:
    """An embedding whose weights are still to come. torch's own would draw some, and on the meta device it imports its
    compiler for that, which takes seconds."""
    matrix = torch.empty(spec.vocabulary_size, spec.hidden_size)
    made: nn.Embedding = nn.Embedding.from_pretrained(matrix, freeze=False)
    return made


class Embedding(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embedding = _embedding(spec)

    def forward(self, tokens: Tensor) -> Tensor:
        """The tokens' embeddings: [B, T] -> [B, T, H]."""
        hidden: Tensor = self.embedding(tokens)
        return hidden


class Head(nn.Module):
    """The final norm and a head of its own; `model.loss` passes features through them, chunk by chunk."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.norm = norm(spec, spec.hidden_size)
        self.head = nn.Linear(spec.hidden_size, spec.vocabulary_size, bias=False)

    @property
    def matrix(self) -> Tensor:
        """The head's matrix, [V, H]."""
        return self.head.weight


class TiedEnds(nn.Module):
    """The embedding, whose matrix is the head's as well, and the final norm."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embedding = _embedding(spec)
        self.norm = norm(spec, spec.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """The tokens' embeddings: [B, T] -> [B, T, H]."""
        hidden: Tensor = self.embedding(tokens)
        return hidden

    @property
    def matrix(self) -> Tensor:
        """The head's matrix, [V, H]."""
        return self.embedding.weight


def ends_of(spec: ModelSpec) -> tuple[Embedding, Head] | tuple[TiedEnds, TiedEnds]:
    """The modules of the two ends; the same one twice where embeddings are tied."""
    if spec.embeddings == "Separate":
        return Embedding(spec), Head(spec)
    ends = TiedEnds(spec)
    return ends, ends


def soft_cap_of(spec: ModelSpec) -> float | None:
    return None if spec.logit_soft_cap is None else float(spec.logit_soft_cap)


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """Logits that stay between -cap and cap: cap tanh(logits / cap) (Gemma 2, arXiv 2408.00118, section 2). None: as
    they are."""
    return logits if cap is None else cap * torch.tanh(logits / cap)
