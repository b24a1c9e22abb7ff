"""A buffer of a fixed size through which portions of a checkpoint pass in their order."""

import threading
from collections import deque

from torch import Tensor

from pseudoreal_trainer.engine.state.pinned import Allocator, Block, PlainMemory

ALIGNMENT = 8
"""Alignment in bytes that suits elements of every type."""


class Ring:
    """A ring buffer: one thread takes stretches of it, another gives them back, oldest first."""

    def __init__(self, memory: Tensor) -> None:
        """`memory`: bytes, [size]; enough for two elements at least."""
        self._bytes = memory
        self._end = self._used = 0
        self._lengths: deque[int] = deque()
        """Bytes of each portion that is taken, oldest first, with those left unused before it at the buffer's end."""
        self._changed = threading.Condition()

    @property
    def size(self) -> int:
        """Size in bytes."""
        return len(self._bytes)

    @property
    def largest(self) -> int:
        """Most bytes of a portion: two such portions always fit, wherever the first one lies."""
        return len(self._bytes) // 2 // ALIGNMENT * ALIGNMENT

    def take(self, size: int) -> Tensor:
        """Memory for a portion, [size] bytes; waits until that is free. Never more than `largest`."""
        capacity, length = len(self._bytes), _aligned(size)
        left_out = 0 if self._end + length <= capacity else capacity - self._end
        with self._changed:
            self._changed.wait_for(lambda: self._used + left_out + length <= capacity)
            begin = (self._end + left_out) % capacity
            self._end = begin + length
            self._used += left_out + length
            self._lengths.append(left_out + length)
        return self._bytes[begin : begin + size]

    def give_back(self) -> None:
        """Gives back the memory that was taken first."""
        with self._changed:
            self._used -= self._lengths.popleft()
            self._changed.notify()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class KeptRing:
    """The ring of a rank, kept from one checkpoint to the next: fresh memory costs more than what is copied into it."""

    def __init__(self, memory: Allocator) -> None:
        """`memory`: allocator of the host memory that crosses the bus."""
        self._memory = memory
        self._block = Block(0, memory)
        self._ring: Ring | None = None

    def ring(self, size: int, *, crosses: bool) -> Ring:
        """A ring of at least `size` bytes. The one that was asked for before must no longer be used.

        `crosses`: whether some of what passes through it comes over the bus; what is on the host already needs no
        pinned memory. To be asked for between steps: pinning memory waits for all kernels of the device, and between
        steps none waits for a message that depends on what this rank calls later.
        """
        if self._ring is None or self._ring.size < size:
            self.close()
            self._block = Block(max(size, 2 * ALIGNMENT), self._memory if crosses else PlainMemory())
            self._ring = Ring(self._block.memory)
        return self._ring

    def close(self) -> None:
        self._block.close()
