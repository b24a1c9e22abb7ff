"""The host memory of a rank that crosses the bus, pinned where there is a GPU: blocks of it, and views of these.

A GPU copies from and to pinned memory by itself, while threads of this process go on. Each block is asked for once and
exactly as large as the plan says; torch's allocator for pinned memory would round every vector up to a power of two.
The largest is the region, through which state passes. What depends on a batch or is there for checkpoints has blocks of
its own, which are made when that is known.
"""

import mmap
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.forecast.memory.crossing import Crossing, Use


class Allocator(Protocol):
    @property
    def pinned(self) -> int:
        """Number of bytes that are pinned now."""

    def allocate(self, size: int) -> Tensor:
        """Memory of `size` bytes, all zero, that begins at a page."""

    def free(self, memory: Tensor) -> None:
        """Frees memory that nothing reads or writes any more."""


class PlainMemory:
    """Ordinary memory of the process."""

    pinned = 0

    def allocate(self, size: int) -> Tensor:
        # Private, as all other memory of the process: a limit on its data counts it.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Fewer faults when it is first touched, and fewer misses in the tables of pages during updates.
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def free(self, memory: Tensor) -> None:
        """Does nothing: the memory goes back with its last view."""


class PinnedMemory:
    """Memory pinned for the GPU of a rank, which is the current device of the calling thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.pinned = 0

    def allocate(self, size: int) -> Tensor:
        """Pinned memory, [size] bytes. Raises TrainingError when the system does not pin as much."""
        memory = PlainMemory().allocate(size)
        with torch.cuda.device(self._device):
            failed = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
        if failed:
            raise TrainingError(
                f"{size:,} bytes of host memory cannot be pinned for copies to and from the GPU (CUDA error {failed});"
                " give the pod more memory, or let units move to disk (offload.budget.host, offload.homes)"
            )
        self.pinned += size
        return memory

    def free(self, memory: Tensor) -> None:
        # torch does not know this memory: nothing but this wait keeps a copy from reading what is free.
        torch.cuda.synchronize(self._device)
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
        self.pinned -= len(memory)


def allocator_for(device: torch.device) -> Allocator:
    return PinnedMemory(device) if device.type == "cuda" else PlainMemory()


class Block:
    """Memory, [size] bytes, with one owner, who knows when no copy uses it."""

    def __init__(self, size: int, allocator: Allocator) -> None:
        self._allocator = allocator
        self.memory = allocator.allocate(size) if size else torch.empty(0, dtype=torch.uint8)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return len(self.memory)

    def close(self) -> None:
        """Frees the memory, whose views are no longer used."""
        memory, self.memory = self.memory, torch.empty(0, dtype=torch.uint8)
        if len(memory):
            self._allocator.free(memory)


class Region(Block):
    """The block through which state passes; it lives as long as the engine. Each piece of it has one owner, who knows
    when no copy uses it."""

    def __init__(self, crossing: Crossing, allocator: Allocator) -> None:
        super().__init__(crossing.size, allocator)
        self._crossing = crossing

    def bytes_of(self, use: Use, number: int) -> Tensor:
        piece = self._crossing.ranges[use, number]
        return self.memory[piece.start : piece.stop]

    def vector(self, use: Use, number: int, dtype: torch.dtype) -> Tensor:
        return self.bytes_of(use, number).view(dtype)

    def all_of(self, use: Use) -> list[Tensor]:
        """All pieces of a use, in their order, as bytes."""
        return [self.bytes_of(use, number) for number in range(self._crossing.count(use))]


class PassingBuffers:
    """Buffers through which reduced gradients pass on their way to an update or to the disk, each for one at a time.

    There is always one left: before a gradient is kept, the update of the one that came as many gradients before it as
    there are buffers is done. A unit's update, or the code that leaves it out, gives its buffer back.
    """

    def __init__(self, buffers: list[Tensor]) -> None:
        self._free = list(buffers)

    def take(self) -> Tensor:
        """A buffer, as bytes."""
        assert self._free, "an update is done before its buffer is needed again"
        return self._free.pop()

    def give_back(self, buffer: Tensor) -> None:
        self._free.append(buffer)
