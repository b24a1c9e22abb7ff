"""How many bytes of text each token stands for, from the description of the tokenizer: for exact bits per byte.

Decoding tokens one by one does not tell: a token may be a part of a character, which decodes to something longer. What
a normalizer changes in the text before it is tokenized is not seen here.
"""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pseudoreal_trainer.data.tokenizer.byte_characters import BYTE_CHARACTERS
from pseudoreal_trainer.errors import InvalidJobError

TokenBytes = NDArray[np.int64]
"""For each token, [vocabulary], the bytes of UTF-8 that it stands for; 0 for special tokens and for unused numbers."""

_FALLBACK = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE = "\u2581"
"""What SentencePiece writes for a space."""


def bits_per_byte(nats: float, text_bytes: int) -> float:
    """The bits that a byte of text costs. `nats`: the sum of the losses of tokens that stand for `text_bytes` bytes."""
    return nats / (math.log(2) * text_bytes)


def token_bytes(description: dict[str, Any], vocabulary: int) -> TokenBytes:
    """The table for a `tokenizer.json`. Raises InvalidJobError for kinds of tokenizers that lose bytes of the text."""
    size = _size_of(description)
    table = np.zeros(vocabulary, dtype=np.int64)
    for token, number in pieces(description["model"]):
        table[number] = size(token)
    for added in description.get("added_tokens") or []:
        table[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return table


def pieces(model: dict[str, Any]) -> Iterable[tuple[str, int]]:
    """The tokens of the `model` of a tokenizer.json with their numbers, without those that were added to it."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        return vocabulary.items()
    return ((piece, number) for number, (piece, _) in enumerate(vocabulary))  # Unigram: [piece, score]


def _size_of(description: dict[str, Any]) -> Callable[[str], int]:
    """Bytes of a token, as this kind of tokenizer writes tokens."""
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
    """The types of a part of the pipeline, of a Sequence those of its parts."""
    if part:
        yield part["type"]
        for inner in part.get("pretokenizers") or part.get("decoders") or []:
            yield from _kinds(inner)


_BYTE_SIZES = dict.fromkeys(BYTE_CHARACTERS, 1)


def _byte_level_size(token: str) -> int:
    # A character for each byte; others can only be in tokens that no text has.
    return sum(_BYTE_SIZES.get(character) or len(character.encode()) for character in token)


def _fallback_size(token: str) -> int:
    return 1 if _FALLBACK.fullmatch(token) else len(token.replace(_SPACE, " ").encode())
