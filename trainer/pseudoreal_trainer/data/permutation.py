"""A keyed permutation of [0, n). Any entry is computed on its own, so no list of samples is ever in memory. Pure.

A Feistel network of four rounds on the smallest even number of bits that holds n - 1, at least 8; results outside of
[0, n) are encrypted again until they are inside ("cycle walking": Black and Rogaway 2002, "Ciphers with arbitrary
finite domains"). Round function and keys use SplitMix64 (Steele, Lea and Flood 2014). Only 64-bit integers are used:
the result is the same on every machine and with every release of numpy. Checkpoints record the name of the permutation:
its output must never change.
"""

import numpy as np
from numpy.typing import NDArray

NAME = "feistel-splitmix64-v1"

Words = NDArray[np.uint64]

_ROUNDS = 4
_GOLDEN = 0x9E3779B97F4A7C15
_LEAST_HALF_BITS = 4


def permute(indices: Words, count: int, *key: int) -> Words:
    """Return the image of each of `indices`, all below `count`, under the permutation. `key`: any numbers below
    2**64."""
    # An index outside of [0, n) may cycle outside forever: the loop below would not end.
    assert not len(indices) or indices.max() < count, f"every index is below {count}; the largest is {indices.max()}"
    half = max((max(count - 1, 1).bit_length() + 1) // 2, _LEAST_HALF_BITS)
    rounds = _round_keys(key)
    found = _encrypted(indices, half, rounds)
    while len(outside := np.flatnonzero(found >= count)):
        found[outside] = _encrypted(found[outside], half, rounds)
    return found


def _encrypted(indices: Words, half: int, rounds: list[np.uint64]) -> Words:
    """Return the image of each index: words of 2 * `half` bits."""
    bits, mask = np.uint64(half), np.uint64(2**half - 1)
    left, right = indices >> bits, indices & mask
    for key in rounds:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return left << bits | right


def _round_keys(key: tuple[int, ...]) -> list[np.uint64]:
    """Return the first outputs of SplitMix64, from a seed that depends on every number of the key."""
    seed = 0
    for number in key:
        seed = _mixed_one(seed ^ number)
    return [np.uint64(_mixed_one((seed + turn * _GOLDEN) % 2**64)) for turn in range(_ROUNDS)]


def _mixed_one(word: int) -> int:
    return int(_mixed(np.array([word], dtype=np.uint64))[0])


def _mixed(words: Words) -> Words:
    """Return the next SplitMix64 output of each state in `words`. Overflow is intended; unsigned numpy arrays overflow
    silently."""
    words = words + np.uint64(_GOLDEN)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
