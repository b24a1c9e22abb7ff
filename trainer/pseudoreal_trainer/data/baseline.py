"""A model without learning to compare with: the next byte given the two before it, counted."""

import numpy as np
from numpy.typing import NDArray

from pseudoreal_trainer.data.corpus import Bytes

Counts = NDArray[np.int64]

_CHUNK = 1 << 20
_MOST_CHUNKS = 16
"""Most chunks that are counted, spread evenly over the training text: half a second on one core, in which the other
ranks wait."""


def order2_nats(train: Bytes, windows: Bytes) -> float:
    """Mean negative log likelihood of windows[:, 2:], each byte given the two before it, nats per byte; windows [W, n].

    Interpolated Witten-Bell smoothing: p(c | context) = (n(context c) + t(context) p(c | shorter context)) /
    (n(context) + t(context)), t being the number of different bytes seen after the context; below order 0 all 256
    bytes are equally likely (Witten and Bell 1991, "The zero-frequency problem"). Counts are from the whole training
    text when it is no longer than 16 MiB, otherwise from as much of it.
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
    """The bytes before each position as one number: the nearest byte is the lowest digit in base 256."""
    code = np.zeros(length, dtype=np.int64)
    for power, digit in enumerate(previous):
        code += digit << (8 * power)
    return code


def _chunks(length: int) -> list[range]:
    """The parts of a text that are counted."""
    count = -(-length // _CHUNK)
    kept = range(count) if count <= _MOST_CHUNKS else [i * count // _MOST_CHUNKS for i in range(_MOST_CHUNKS)]
    return [range(chunk * _CHUNK, min((chunk + 1) * _CHUNK, length)) for chunk in kept]


def _counts(text: Bytes, chunks: list[range], order: int, contexts: NDArray[np.int64]) -> Counts:
    """Counts, [contexts, 256]: how often each byte follows each of these runs of `order` bytes. They are made in
    chunks, and without the runs that nobody asks for, to bound memory."""
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
