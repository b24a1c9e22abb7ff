"""A model without learning to compare with: the next byte given the two before it, counted."""

import numpy as np
from numpy.typing import NDArray

from pseudoreal_trainer.data.corpus import Bytes

Counts = NDArray[np.int64]
_CHUNK = 1 << 20


def order2_nats(train: Bytes, text: Bytes, targets: NDArray[np.int64]) -> float:
    """Mean negative log likelihood of text[targets], nats per byte; every target is at least 2.

    Interpolated Witten-Bell smoothing: p(c | context) = (n(context c) + t(context) p(c | shorter context)) /
    (n(context) + t(context)), t being the number of different bytes seen after the context; below order 0 all 256
    bytes are equally likely (Witten and Bell 1991, "The zero-frequency problem").
    """
    codes = [text[targets - back].astype(np.int64) for back in (0, 1, 2)]
    probability: NDArray[np.float64] = np.full(len(targets), 1.0 / 256)
    for order in (0, 1, 2):
        contexts, row = np.unique(_code(codes[1 : order + 1], len(targets)), return_inverse=True)
        table = _counts(train, order, contexts)
        seen, kinds = table.sum(1)[row], np.count_nonzero(table, 1)[row]
        known = np.maximum(seen + kinds, 1)
        interpolated = (table[row, codes[0]] + kinds * probability) / known
        probability = np.where(seen > 0, interpolated, probability)
    return float(-np.log(probability).mean())


def _code(previous: list[NDArray[np.int64]], length: int) -> NDArray[np.int64]:
    """The nearest byte is the lowest digit in base 256."""
    code = np.zeros(length, dtype=np.int64)
    for power, digit in enumerate(previous):
        code += digit << (8 * power)
    return code


def _counts(text: Bytes, order: int, contexts: NDArray[np.int64]) -> Counts:
    """[contexts, 256]: how often each byte follows each of these runs of `order` bytes. In chunks, and without the runs
    that nobody asks for, to bound memory."""
    others = len(contexts)
    rows = np.full(256**order, others)
    rows[contexts] = np.arange(others)
    counts = np.zeros((others + 1) * 256, dtype=np.int64)
    for start in range(order, len(text), _CHUNK):
        end = min(start + _CHUNK, len(text))
        previous = [text[start - back : end - back].astype(np.int64) for back in range(1, order + 1)]
        found = rows[_code(previous, end - start)]
        counts += np.bincount(found * 256 + text[start:end], minlength=len(counts))
    return counts.reshape(-1, 256)[:others]
