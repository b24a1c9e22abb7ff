"""A baseline model without learning: the next byte predicted from counts of the two bytes before it."""

import numpy as np
from numpy.typing import NDArray

from pseudoreal_trainer.data.corpus import Bytes

Counts = NDArray[np.int64]

_CHUNK = 1 << 20
_MOST_CHUNKS = 16
"""Maximum number of chunks that are counted, spread evenly over the training text: half a second on one core, during
which the other ranks wait."""


def order2_nats(train: Bytes, windows: Bytes) -> float:
    """Return the mean negative log likelihood of windows[:, 2:], each byte given the two before it, in nats per byte;
    windows [W, n].

    Interpolated Witten-Bell smoothing: p(c | context) = (n(context c) + t(context) p(c | shorter context)) /
    (n(context) + t(context)), t being the number of different bytes seen after the context; below order 0 all 256 bytes
    are equally likely (Witten and Bell 1991, "The zero-frequency problem"). Counts come from the whole training text if
    it has at most 16 MiB, otherwise from 16 MiB of it.
    """
    width = windows.shape[1] - 2
    codes = [windows[:, 2 - back : 2 - back + width].flatten().astype(np.int64) for back in (0, 1, 2)]
    probability: NDArray[np.float64] = np.full(len(codes[0]), 1.0 / 256)
    chunks = _chunks(len(train))
    for order in (0, 1, 2):
        contexts, row = np.unique(_code(codes[1 : order + 1], len(codes[0])), return_inverse=True)
        table = _counts(train, chunks, order, contexts)
        seen, kinds = table.sum(1)[row], np.count_nonzero(table, 1)[row]
        known = np.maximum(seen + kinds, 1)
        interpolated = (table[row, codes[0]] + kinds * probability) / known
        probability = np.where(seen > 0, interpolated, probability)
    return float(-np.log(probability).mean())


def _code(previous: list[NDArray[np.int64]], length: int) -> NDArray[np.int64]:
    """Return the bytes before each position as one number in base 256, with the nearest byte as the lowest digit."""
    code = np.zeros(length, dtype=np.int64)
    for power, digit in enumerate(previous):
        code += digit << (8 * power)
    return code


def _chunks(length: int) -> list[range]:
    """Return the byte ranges of the text to count: all of the text, or `_MOST_CHUNKS` ranges spread evenly over a
    longer text."""
    count = -(-length // _CHUNK)
    kept = range(count) if count <= _MOST_CHUNKS else [i * count // _MOST_CHUNKS for i in range(_MOST_CHUNKS)]
    return [range(chunk * _CHUNK, min((chunk + 1) * _CHUNK, length)) for chunk in kept]


def _counts(text: Bytes, chunks: list[range], order: int, contexts: NDArray[np.int64]) -> Counts:
    """Return counts, [contexts, 256]: how often each byte follows each context, a run of `order` bytes as encoded by
    `_code`. To bound memory, the text is counted in chunks, and only for the given contexts."""
    others = len(contexts)
    rows = np.full(256**order, others)
    rows[contexts] = np.arange(others)
    counts = np.zeros((others + 1) * 256, dtype=np.int64)
    for chunk in chunks:
        start = max(order, chunk.start)
        read = text[start - order : chunk.stop].astype(np.int64)
        following = read[order:]
        previous = [read[order - back : len(read) - back] for back in range(1, order + 1)]
        found = rows[_code(previous, len(following))]
        counts += np.bincount(found * 256 + following, minlength=len(counts))
    return counts.reshape(-1, 256)[:others]
