"""Stochastic rounding of moments to bfloat16, or to 8-bit floats in blocks (`blocks`).

A bfloat16 has 8 significant bits. Rounded to the nearest one, a moment that changes by less than 0.2 % in a step would
never change: with beta2 = 0.999 the second moment could not shrink. Rounded stochastically, a value becomes one of its
two neighbours, with the probabilities whose mean is the value. This matters more for an 8-bit float, with 4 significant
bits.

The random bits of an element are a function of the seed, the name of the tensor, the index of the element in the
flattened tensor, and the number of the update. A layout decides none of them, so all layouts round alike, and so do a
run that is resumed and an update that is repeated. An element has one random word of 32 bits per update, made by
torch's integer operations, which every device has: the lower half rounds the first moment, the upper half the second.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from pseudoreal_api.spec.optimizer import MOMENT_BLOCK as BLOCK
from torch import Tensor

from pseudoreal_trainer.engine.state.blocks import BLOCKS, CUT_BITS, BlockScratch, pack, unpack
from pseudoreal_trainer.plan.parts import parts_of
from pseudoreal_trainer.plan.sizes import blocks_of
from pseudoreal_trainer.plan.units import Unit

_WORD, _DOUBLE_WORD = 1 << 32, 1 << 64
_FACTORS = (0x7FEB352D, 0x846CA68B)
"""Factors of lowbias32, a mixing function of 32 bits by C. Wellons."""
_LOWER_HALF = 0xFFFF
_RANDOM_BITS = 16
"""Number of random bits for each moment of an element."""
_HAVE_SIGNS = (True, False)
"""Whether the numbers of the first and of the second moment have signs."""
_QUIET_NAN = 0x7FC00000
"""Bits of a float32 that is not a number. Random bits added to the largest such pattern would make it a zero."""


@dataclass(frozen=True)
class RandomRange:
    """Consecutive elements of one tensor, in a range of a unit's flat vector."""

    begin: int
    """Index of the first element, relative to the start of the range of the flat vector; may be negative."""
    end: int
    key: int
    """64 bits, from the seed, the name of the tensor, and the upper half of the elements' indices."""
    first: int
    """Index of the first element in the flattened tensor, modulo 2^32."""

    def moved(self, by: int) -> "RandomRange":
        return replace(self, begin=self.begin + by, end=self.end + by)

    def weyl_sequence(self, update: int) -> tuple[int, int]:
        """Return (start, step) of the sequence that numbers the elements in this update: element i of the tensor has
        the word start + i * step, modulo 2^32. The step is odd, so no two elements have the same word."""
        mixed = _mix(self.key ^ _mix(update))
        return mixed % _WORD, mixed >> 32 | 1


def random_ranges(unit: Unit, elements: range, seed: int) -> tuple[RandomRange, ...]:
    """Return the ranges of random bits of a range of the unit's flat vector, without padding."""
    return tuple(
        RandomRange(part.offset + begin - part.begin - elements.start, part.offset + end - part.begin - elements.start,
                    _key(seed, part.name, begin // _WORD), begin % _WORD)
        for part in parts_of(unit, elements)
        for begin, end in _cut_at_words(part.begin, part.end)
    )  # fmt: skip


def _cut_at_words(begin: int, end: int) -> Iterator[tuple[int, int]]:
    while begin < end:
        stop = min(end, (begin // _WORD + 1) * _WORD)
        yield begin, stop
        begin = stop


def _key(seed: int, name: str, upper: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {name} {upper}".encode(), digest_size=8).digest(), "little")


def _mix(number: int) -> int:
    """Return a 64-bit hash of a 64-bit number (SplitMix64; Steele, Lea, Flood, OOPSLA 2014)."""
    number = (number + 0x9E3779B97F4A7C15) % _DOUBLE_WORD
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % _DOUBLE_WORD
    number = (number ^ number >> 27) * 0x94D049BB133111EB % _DOUBLE_WORD
    return number ^ number >> 31


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word


class MomentRounding:
    """Moments of a piece between their storage, in bfloat16 or in blocks, and an update in the master dtype. Owns the
    scratch memory of one worker on one device."""

    def __init__(self, length: int, master: torch.dtype, device: torch.device, stored: torch.dtype) -> None:
        """`length`: largest number of elements of a piece. `stored`: dtype of the stored moments."""
        self._moments = [torch.empty(length, dtype=master, device=device) for _ in range(2)]
        self._numbers = torch.arange(length, dtype=torch.int32, device=device)
        """0 to length - 1; only read."""
        self._words, self._shifted = (torch.empty_like(self._numbers) for _ in range(2))
        self._blocks = BlockScratch.beside(self._shifted) if stored == BLOCKS else None
        """Scratch memory of blocks; None: moments are in bfloat16."""

    def widen(self, moments: Sequence[Tensor], length: int) -> list[Tensor]:
        """Return copies of the first and the second moment, [length] each, in the master dtype; valid until the next
        call."""
        if self._blocks is None:
            return [wide[:length].copy_(stored) for wide, stored in zip(self._moments, moments, strict=True)]
        bits = self._words[: blocks_of(length) * BLOCK]
        for wide, stored, has_sign in zip(self._moments, moments, _HAVE_SIGNS, strict=True):
            unpack(stored, bits, self._blocks, has_sign=has_sign)
            wide[: len(bits)].copy_(bits.view(torch.float32))
        return [wide[:length] for wide in self._moments]

    def round_into(
        self, moments: Sequence[Tensor], ranges: Sequence[RandomRange], begin: int, length: int, update: int
    ) -> None:
        """Round the tensors that `widen` has returned, [length] each, into the moments. `begin`: index of the piece's
        first element, relative to `ranges`. `update`: number of the update."""
        if self._blocks is not None:
            self._pack_into(moments, ranges, begin, length, update)
            return
        halves = self._random_halves(ranges, begin, length, update)
        for wide, stored, half in zip(self._moments, moments, halves, strict=True):
            # With float64 masters, which exist for exact comparisons, this allocates.
            bits = wide[:length].float().view(torch.int32)
            bits.clamp_(max=_QUIET_NAN).add_(half).bitwise_right_shift_(16)
            stored.view(torch.int16).copy_(bits)

    def _pack_into(
        self, moments: Sequence[Tensor], ranges: Sequence[RandomRange], begin: int, length: int, update: int
    ) -> None:
        assert self._blocks is not None, "`round_into` calls this only for blocks"
        whole = blocks_of(length) * BLOCK
        halves = self._random_halves(ranges, begin, whole, update)
        # The second moment first: `pack` uses the memory of its random bits as scratch memory.
        for index in (1, 0):
            # Elements after the last one are zero, as `widen` has read them, and random bits leave a zero as it is.
            bits = self._moments[index][:whole].float().view(torch.int32)
            bits.clamp_(max=_QUIET_NAN).add_(halves[index].bitwise_left_shift_(CUT_BITS - _RANDOM_BITS))
            pack(bits, moments[index], self._blocks, has_sign=_HAVE_SIGNS[index])

    def _random_halves(
        self, ranges: Sequence[RandomRange], begin: int, length: int, update: int
    ) -> tuple[Tensor, Tensor]:
        """Return two tensors of 16 random bits for each element, [length]. Padding, whose moments are zero and stay so,
        has any bits."""
        words, shifted = self._words[:length], self._shifted[:length]
        for one in ranges:
            first, last = max(one.begin, begin), min(one.end, begin + length)
            if first < last:
                start, step = one.weyl_sequence(update)
                start = (start + (one.first + first - one.begin) * step) % _WORD
                torch.add(
                    torch.tensor(_signed(start), dtype=torch.int32),
                    self._numbers[: last - first],
                    alpha=_signed(step),
                    out=words[first - begin : last - begin],
                )
        for factor in _FACTORS:
            words.bitwise_xor_(torch.bitwise_right_shift(words, 16, out=shifted)).mul_(_signed(factor))
        words.bitwise_xor_(torch.bitwise_right_shift(words, 16, out=shifted))
        return words.bitwise_and_(_LOWER_HALF), shifted.bitwise_and_(_LOWER_HALF)
