"""A buffer of fixed size through which chunks of a checkpoint pass in order."""

import threading
from collections import deque

from torch import Tensor

from pseudoreal_trainer.engine.state.pinned import Allocator, Block, PlainMemory

ALIGNMENT = 8
"""Alignment in bytes that suits elements of every dtype."""


class Ring:
    """A ring buffer: one thread takes memory from it, another gives the memory back, oldest first."""

    def __init__(self, memory: Tensor) -> None:
        """`memory`: bytes, [size]; room for at least two elements."""
        self._bytes = memory
        self._end = self._used = 0
        self._lengths: deque[int] = deque()
        """Bytes of each taken chunk, oldest first, including bytes left unused before it at the end of the buffer."""
        self._changed = threading.Condition()

    @property
    def size(self) -> int:
        """Size in bytes."""
        return len(self._bytes)

    @property
    def largest(self) -> int:
        """Largest chunk in bytes: two such chunks always fit, wherever the first one lies."""
        return len(self._bytes) // 2 // ALIGNMENT * ALIGNMENT

    def take(self, size: int) -> Tensor:
        """Return memory for a chunk, [size] bytes, once it is free. `size` is at most `largest`."""
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
        """Give back the oldest chunk."""
        with self._changed:
            self._used -= self._lengths.popleft()
            self._changed.notify()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class KeptRing:
    """Ring of a rank, kept from one checkpoint to the next: fresh memory costs more than the copies into it."""

    def __init__(self, memory: Allocator) -> None:
        """`memory`: allocator of host memory for copies to and from the device."""
        self._memory = memory
        self._block = Block(0, memory)
        self._ring: Ring | None = None

    def ring(self, size: int, *, crosses: bool) -> Ring:
        """Return a ring of at least `size` bytes. The ring of the previous call must not be used any more.

        `crosses`: whether some of the data comes over the bus; data that is on the host already needs no pinned memory.
        Call this between steps: pinning memory waits for all kernels of the device, and between steps no kernel waits
        for a message that depends on this rank's later calls.
        """
        if self._ring is None or self._ring.size < size:
            self.close()
            self._block = Block(max(size, 2 * ALIGNMENT), self._memory if crosses else PlainMemory())
            self._ring = Ring(self._block.memory)
        return self._ring

    def close(self) -> None:
        self._block.close()
