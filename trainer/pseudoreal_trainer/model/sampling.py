"""Text from a model, byte by byte."""

import torch
from pseudoreal_api.spec.data import BYTES
from torch import Tensor

from pseudoreal_trainer.model.transformer import Transformer

TEMPERATURE = 0.8


@torch.no_grad()
def generate(model: Transformer, prompt: bytes, count: int, sequence: int, seed: int = 0) -> bytes:
    """`count` bytes that go on from a prompt of at least one byte. The same seed gives the same text."""
    generator = torch.Generator().manual_seed(seed)
    device = model.embedding.weight.device
    text = bytearray(prompt)
    for _ in range(count):
        tokens = torch.tensor([list(text[-sequence:])], device=device)
        text.append(_draw(model(tokens)[0, -1, :BYTES], generator))
    return bytes(text[len(prompt) :])


def readable(text: bytes) -> str:
    """The text as a terminal can show it: a model that has learnt little writes control characters, too."""
    decoded = text.decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in decoded)


def _draw(logits: Tensor, generator: torch.Generator) -> int:
    """A token drawn by the probabilities of the logits, [256]."""
    probabilities = torch.softmax(logits.double().cpu() / TEMPERATURE, dim=0)
    return int(torch.multinomial(probabilities, 1, generator=generator).item())
