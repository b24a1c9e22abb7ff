"""Host memory of a rank for copies to and from the device, pinned if there is an accelerator: blocks, and views of
blocks.

An accelerator copies from and to pinned memory by itself, while threads of this process continue. Each block is
allocated once, with exactly the size of the plan; torch's allocator for pinned memory would round every vector up to a
power of two. The largest block is the pinned arena, through which state passes. Memory that depends on a batch, or
serves checkpoints, has separate blocks, allocated once their size is known.
"""

import mmap
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from pseudoreal_trainer.accelerator.adapters import adapter_of
from pseudoreal_trainer.plan.memory.pinned_arena import ArenaLayout, ArenaUse


class Allocator(Protocol):
    """Allocator of host memory."""

    @property
    def pinned(self) -> int:
        """Number of bytes that are pinned now."""

    def allocate(self, size: int) -> Tensor:
        """Return memory of `size` bytes, all zero, that starts at a page."""

    def free(self, memory: Tensor) -> None:
        """Free memory that nothing reads or writes any more."""


class PlainMemory:
    """Ordinary memory of the process."""

    pinned = 0

    def allocate(self, size: int) -> Tensor:
        # Private, like all other memory of the process: a limit on its data counts this memory.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Fewer page faults at the first touch, and fewer TLB misses during updates.
        if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
            with suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def free(self, memory: Tensor) -> None:
        """Do nothing: the memory is freed with its last view."""


class PinnedMemory:
    """Memory pinned for the accelerator of a rank."""

    def __init__(self, device: torch.device) -> None:
        self._adapter = adapter_of(device)
        self.pinned = 0

    def allocate(self, size: int) -> Tensor:
        """Return pinned memory, [size] bytes. Raises TrainingError if the system cannot pin that much."""
        memory = self._adapter.pin(PlainMemory().allocate(size))
        self.pinned += size
        return memory

    def free(self, memory: Tensor) -> None:
        self._adapter.unpin(memory)
        self.pinned -= len(memory)


def allocator_for(device: torch.device) -> Allocator:
    return PlainMemory() if device.type == "cpu" else PinnedMemory(device)


class Block:
    """Memory, [size] bytes, with one owner. The owner closes the block once no copy uses it."""

    def __init__(self, size: int, allocator: Allocator) -> None:
        self._allocator = allocator
        self.memory = allocator.allocate(size) if size else torch.empty(0, dtype=torch.uint8)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return len(self.memory)

    def close(self) -> None:
        """Free the memory; its views must not be used any more."""
        memory, self.memory = self.memory, torch.empty(0, dtype=torch.uint8)
        if len(memory):
            self._allocator.free(memory)


class PinnedArena(Block):
    """Pinned arena through which state passes; it lives as long as the engine. Each piece has one owner, which reuses
    the piece only after all copies from and to it are done."""

    def __init__(self, crossing: ArenaLayout, allocator: Allocator) -> None:
        super().__init__(crossing.size, allocator)
        self._crossing = crossing

    def bytes_of(self, use: ArenaUse, number: int) -> Tensor:
        piece = self._crossing.ranges[use, number]
        return self.memory[piece.start : piece.stop]

    def vector(self, use: ArenaUse, number: int, dtype: torch.dtype) -> Tensor:
        return self.bytes_of(use, number).view(dtype)

    def all_of(self, use: ArenaUse) -> list[Tensor]:
        """Return all pieces of a use as bytes, in their order."""
        return [self.bytes_of(use, number) for number in range(self._crossing.count(use))]


class BounceBuffers:
    """Bounce buffers for reduced gradients on their way to an update or to the disk, each for one gradient at a time.

    With n buffers, a gradient is kept only once the update n gradients earlier is done, so a buffer is always free. A
    unit's buffer is given back after its update, or when the update is skipped.
    """

    def __init__(self, buffers: list[Tensor]) -> None:
        # Several threads use the list without a lock: its `pop` and `append` are atomic.
        self._free = list(buffers)

    def take(self) -> Tensor:
        """Return a free buffer, as bytes; the caller owns it until `give_back`."""
        assert self._free, "an update is done before its buffer is needed again"
        return self._free.pop()

    def give_back(self, buffer: Tensor) -> None:
        self._free.append(buffer)
