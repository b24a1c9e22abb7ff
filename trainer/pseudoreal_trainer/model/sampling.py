"""Sampling of a token from the logits of a model."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling."""

    vocabulary: int
    """Number of tokens of the tokenizer; only ids below this number are drawn. The head may have more rows."""
    temperature: float = 0.8
    """Divisor of the logits; 0: the most probable token is taken."""
    top_p: float = 1.0
    """Probability: a token is drawn from the fewest most probable tokens that together have at least this probability
    (Holtzman et al. 2020, nucleus sampling)."""
    seed: int = 0


def readable(text: str) -> str:
    """Return the text with unprintable characters replaced: a model that has learnt little also writes control
    characters."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw a token id from the logits, [V]. Only ids below `sampling.vocabulary` are drawn."""
    logits = logits[: sampling.vocabulary]
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits.double().cpu() / sampling.temperature, dim=0)
    if sampling.top_p < 1:
        probabilities = _nucleus(probabilities, sampling.top_p)
    return int(torch.multinomial(probabilities, 1, generator=generator).item())


def skip(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> None:
    """Advance the generator as `draw` does. `logits`: as in `draw`; only their number counts."""
    if sampling.temperature != 0:
        # A draw takes as many random numbers as there are tokens, whatever their probabilities.
        torch.multinomial(torch.ones(len(logits[: sampling.vocabulary]), dtype=torch.float64), 1, generator=generator)


def _nucleus(probabilities: Tensor, share: float) -> Tensor:
    """Return the probabilities, [V], with only the fewest tokens that together have at least `share`; all others are
    0."""
    ordered, tokens = probabilities.sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    return probabilities.index_fill(0, tokens[before >= share], 0.0)
