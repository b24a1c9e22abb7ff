"""Number of text bytes of each token, from the description of the tokenizer: for exact bits per byte.

Decoding single tokens would give wrong sizes: a token may be a part of a character, and decodes to U+FFFD, which has
three bytes. Changes made to the text by a normalizer before tokenization are not counted.
"""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pseudoreal_trainer.errors import InvalidJobError

TokenBytes = NDArray[np.int64]
"""Number of UTF-8 bytes of text of each token, [vocabulary]; 0 for special tokens and unused numbers."""

_FALLBACK = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE = "\u2581"
"""SentencePiece's representation of a space."""


def bits_per_byte(nats: float, text_bytes: int) -> float:
    """Return bits per byte of text. `nats`: the sum of the losses of the tokens of `text_bytes` bytes."""
    return nats / (math.log(2) * text_bytes)


def token_bytes(description: dict[str, Any], vocabulary: int) -> TokenBytes:
    """Return the number of text bytes of each token of a `tokenizer.json`. Raises InvalidJobError for kinds of
    tokenizers that lose bytes of the text."""
    size = _size_of(description)
    table = np.zeros(vocabulary, dtype=np.int64)
    for token, number in pieces(description["model"]):
        table[number] = size(token)
    for added in description.get("added_tokens") or []:
        table[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return table


def pieces(model: dict[str, Any]) -> Iterable[tuple[str, int]]:
    """Return the tokens of the `model` of a tokenizer.json with their numbers, without added tokens."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        return vocabulary.items()
    return ((piece, number) for number, (piece, _) in enumerate(vocabulary))  # Unigram: [piece, score]


def _size_of(description: dict[str, Any]) -> Callable[[str], int]:
    """Return the function that computes the bytes of a token for this kind of tokenizer."""
    model = description["model"]
    if "ByteLevel" in {*_kinds(description.get("pre_tokenizer")), *_kinds(description.get("decoder"))}:
        return _byte_level_size
    if model.get("byte_fallback"):
        return _fallback_size
    raise InvalidJobError(
        f"the tokenizer is a {model.get('type')} that works neither on bytes nor falls back to them, so text is lost in"
        " it; use a byte-level BPE, or a tokenizer with byte_fallback"
    )


def _kinds(part: dict[str, Any] | None) -> Iterable[str]:
    """Yield the type of a part of the pipeline; for a Sequence, also the types of its parts."""
    if part:
        yield part["type"]
        for inner in part.get("pretokenizers") or part.get("decoders") or []:
            yield from _kinds(inner)


def _byte_characters() -> list[str]:
    """Return the character for each byte: the byte's own character if it is visible, else a character with a code point
    from 256 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]


BYTE_CHARACTERS = _byte_characters()
"""Character that represents each byte in byte-level BPE (Radford et al. 2019, GPT-2)."""

_BYTE_SIZES = dict.fromkeys(BYTE_CHARACTERS, 1)


def _byte_level_size(token: str) -> int:
    # One character per byte. Other characters occur only in tokens that no text produces.
    return sum(_BYTE_SIZES.get(character) or len(character.encode()) for character in token)


def _fallback_size(token: str) -> int:
    return 1 if _FALLBACK.fullmatch(token) else len(token.replace(_SPACE, " ").encode())
