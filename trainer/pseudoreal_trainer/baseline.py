"""A model without learning to compare with: the next byte given the two before it, counted."""

import numpy as np
from numpy.typing import NDArray

from pseudoreal_trainer.corpus import Bytes

Counts = NDArray[np.int64]
_CHUNK = 1 << 24


def order2_nats(train: Bytes, text: Bytes, targets: NDArray[np.int64]) -> float:
    """Mean negative log likelihood of text[targets], nats per byte; every target is at least 2.

    Interpolated Witten-Bell smoothing: p(c | context) = (n(context c) + t(context) p(c | shorter context)) /
    (n(context) + t(context)), t being the number of different bytes seen after the context; below order 0 all 256
    bytes are equally likely (Witten and Bell 1991, "The zero-frequency problem").
    """
    codes = [text[targets - back].astype(np.int64) for back in (0, 1, 2)]
    probability: NDArray[np.float64] = np.full(len(targets), 1.0 / 256)
    for order in (0, 1, 2):
        table = _counts(train, order).reshape(-1, 256)
        context = _code(codes[1 : order + 1], len(targets))
        seen, kinds = table.sum(1)[context], np.count_nonzero(table, 1)[context]
        known = np.maximum(seen + kinds, 1)
        interpolated = (table[context, codes[0]] + kinds * probability) / known
        probability = np.where(seen > 0, interpolated, probability)
    return float(-np.log(probability).mean())


def _code(previous: list[NDArray[np.int64]], length: int) -> NDArray[np.int64]:
    """The nearest byte is the lowest digit in base 256."""
    code = np.zeros(length, dtype=np.int64)
    for power, digit in enumerate(previous):
        code += digit << (8 * power)
    return code


def _counts(text: Bytes, order: int) -> Counts:
    """How often each run of order + 1 bytes occurs, indexed by its big-endian number. In chunks, to bound memory."""
    counts = np.zeros(256 ** (order + 1), dtype=np.int64)
    for start in range(order, len(text), _CHUNK):
        end = min(start + _CHUNK, len(text))
        runs = [text[start - back : end - back].astype(np.int64) for back in range(order + 1)]
        counts += np.bincount(_code(runs, end - start), minlength=len(counts))
    return counts
