"""Moments as 8-bit floats in blocks: consecutive elements with a common exponent.

A number has 3 bits of fraction. In a block, a first moment has a sign and 4 bits of exponent, a second moment 5 bits of
exponent and no sign. Exponents count from the base of the block, one byte, so that the largest number of the block has
the largest exponent. A number below this range becomes 0 as a first moment. A second moment divides, so it becomes the
smallest number of the range instead.

The scale of a block is a power of two, so each number is one of bfloat16, too, and a block whose numbers are packed
again has the same bytes. Blocks are as short as the unit by which shards are cut: no rank has a part of a block.

A tensor of blocks has the dtype uint8 and, for each block, its numbers and then its base.
"""

from dataclasses import dataclass

import torch
from pseudoreal_api.spec.optimizer import MOMENT_BLOCK as BLOCK
from pseudoreal_api.spec.optimizer import MomentFormat
from torch import Tensor

from pseudoreal_trainer.plan.memory.tiers import UNPACKED_ELEMENTS
from pseudoreal_trainer.plan.sizes import BASE_BYTES, blocks_of
from pseudoreal_trainer.plan.units import Kind

BLOCKS = torch.uint8
"""Dtype of tensors of blocks."""
FRACTION_BITS = 3
CUT_BITS = 23 - FRACTION_BITS
"""Number of bits of a float32 that a number in a block does not have."""

_BLOCK_BYTES = BLOCK + BASE_BYTES
_SIGN, _MAGNITUDE, _MAGNITUDE_OF_FLOAT32 = 0x80, 0x7F, 0x7FFFFFFF
_LARGEST_EXPONENT = {True: 15, False: 31}
"""Whether numbers have a sign -> largest exponent."""


def moment_dtype(moments: MomentFormat, master: torch.dtype) -> torch.dtype:
    """Return the dtype of stored moments."""
    return {"Master": master, "BFloat16": torch.bfloat16, "Float8": BLOCKS}[moments]


def moment_format(moments: torch.dtype, master: torch.dtype) -> MomentFormat:
    """Return the format of moments with this dtype."""
    formats: dict[torch.dtype, MomentFormat] = {master: "Master", torch.bfloat16: "BFloat16", BLOCKS: "Float8"}
    return formats[moments]


def readable_dtype(moments: torch.dtype) -> torch.dtype:
    """Return the dtype in which a checkpoint has stored moments of this dtype, each of them exactly."""
    return torch.bfloat16 if moments == BLOCKS else moments


def largest_number(dtype: torch.dtype) -> float:
    """Return the largest number of a moment's dtype."""
    return (2 - 2**-FRACTION_BITS) * 2.0**127 if dtype == BLOCKS else torch.finfo(dtype).max


def stored_length(elements: int, dtype: torch.dtype) -> int:
    """Return the length of the tensor that stores so many elements, from the first of a block on."""
    return blocks_of(elements) * _BLOCK_BYTES if dtype == BLOCKS else elements


def stored_part(vector: Tensor, part: slice) -> Tensor:
    """Return the view of a stored vector that has the elements of `part`, which starts with a block."""
    begin, end = (stored_length(index, vector.dtype) for index in (part.start, part.stop))
    return vector[begin:end]


@dataclass(frozen=True)
class BlockScratch:
    """Scratch memory for packing and unpacking."""

    numbers: Tensor
    """int32, at least [n] for n elements."""
    codes: Tensor
    """uint8, as long."""
    bases: Tensor
    """int32, one for each block."""

    @classmethod
    def beside(cls, numbers: Tensor) -> "BlockScratch":
        """Return scratch memory for as many elements as `numbers` has, a multiple of BLOCK, on the same device."""
        bases = torch.empty(len(numbers) // BLOCK, dtype=torch.int32, device=numbers.device)
        return cls(numbers, torch.empty_like(numbers, dtype=torch.uint8), bases)


def pack(bits: Tensor, stored: Tensor, scratch: BlockScratch, *, has_sign: bool) -> None:
    """Pack numbers into blocks. `bits`: float32 as int32, [n] for n elements of whole blocks; their CUT_BITS last bits
    are cut off. Overwritten. `stored`: blocks, [stored_length(n)]. `has_sign`: True for a first moment, False for a
    second one."""
    rows, into = bits.view(-1, BLOCK), stored.view(-1, _BLOCK_BYTES)
    spare = scratch.numbers[: len(bits)].view_as(rows)
    if has_sign:
        torch.bitwise_right_shift(rows, 24, out=spare).bitwise_and_(_SIGN)
    rows.bitwise_and_(_MAGNITUDE_OF_FLOAT32).bitwise_right_shift_(CUT_BITS)
    if not has_sign:
        torch.clamp(rows, max=1, out=spare)  # 1 is the smallest number of the range
    bases = torch.amax(rows, 1, keepdim=True, out=scratch.bases[: len(rows)].view(-1, 1))
    bases.bitwise_right_shift_(FRACTION_BITS).sub_(_LARGEST_EXPONENT[has_sign]).clamp_(min=0)
    into[:, BLOCK:].copy_(bases)
    rows.sub_(bases.bitwise_left_shift_(FRACTION_BITS))
    if has_sign:
        rows.clamp_(min=0).bitwise_or_(spare)
    else:
        torch.maximum(rows, spare, out=rows)
    # In two steps: a strided copy that converts takes three times as long.
    codes = scratch.codes[: len(bits)].view_as(rows).copy_(rows)
    into[:, :BLOCK].copy_(codes)


def unpack(stored: Tensor, bits: Tensor, scratch: BlockScratch, *, has_sign: bool) -> None:
    """Unpack blocks, [stored_length(n)], to float32 as int32, [n] for n elements of whole blocks."""
    rows, found = bits.view(-1, BLOCK), stored.view(-1, _BLOCK_BYTES)
    spare, codes = (memory[: len(bits)].view_as(rows) for memory in (scratch.numbers, scratch.codes))
    rows.copy_(codes.copy_(found[:, :BLOCK]))
    bases = scratch.bases[: len(rows)].view(-1, 1).copy_(found[:, BLOCK:]).bitwise_left_shift_(FRACTION_BITS)
    if has_sign:
        rows.bitwise_and_(_MAGNITUDE)
    rows.add_(torch.clamp(rows, max=1, out=spare).mul_(bases)).bitwise_left_shift_(CUT_BITS)
    if has_sign:
        rows.bitwise_or_(spare.copy_(codes).bitwise_and_(_SIGN).bitwise_left_shift_(24))


def put(kind: Kind, values: Tensor, stored: Tensor) -> None:
    """Fill a stored vector with values, [n], rounded to the nearest number of its dtype, ties to even."""
    if stored.dtype != BLOCKS:
        stored.copy_(values)
        return
    for begin in range(0, len(values), UNPACKED_ELEMENTS):
        part = values[begin : begin + UNPACKED_ELEMENTS]
        bits = torch.zeros(blocks_of(len(part)) * BLOCK)
        bits[: len(part)].copy_(part)
        packed = torch.empty(stored_length(len(bits), BLOCKS), dtype=BLOCKS)
        pack(_to_nearest(bits.view(torch.int32)), packed, _fresh_scratch(len(bits)), has_sign=kind == "first_moment")
        stored_part(stored, slice(begin, begin + len(part))).copy_(packed)


def _to_nearest(bits: Tensor) -> Tensor:
    """Return float32 as int32 whose upper bits, before CUT_BITS, are those of the nearest number; in place."""
    is_odd = (bits >> CUT_BITS).bitwise_and_(1)
    return bits.add_((1 << (CUT_BITS - 1)) - 1).add_(is_odd)


def unpacked(kind: Kind, stored: Tensor, elements: int) -> Tensor:
    """Return the numbers of blocks in the memory of the host as bfloat16, [elements]; at most UNPACKED_ELEMENTS."""
    bits = torch.empty(blocks_of(elements) * BLOCK, dtype=torch.int32)
    unpack(stored, bits, _fresh_scratch(len(bits)), has_sign=kind == "first_moment")
    return bits[:elements].view(torch.float32).bfloat16()


def _fresh_scratch(elements: int) -> BlockScratch:
    return BlockScratch.beside(torch.empty(elements, dtype=torch.int32))
