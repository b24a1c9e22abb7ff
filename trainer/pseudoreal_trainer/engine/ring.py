"""A buffer of a fixed size through which portions pass in their order."""

import threading
from collections import deque

import torch
from torch import Tensor

ALIGNMENT = 8
"""Of elements of every type."""


class Ring:
    """One thread takes room, another gives it back, oldest first."""

    def __init__(self, size: int, *, pinned: bool = False) -> None:
        """`size` in bytes; it has a little more when that is less than two elements take."""
        self._bytes = torch.empty(max(_aligned(size), 2 * ALIGNMENT), dtype=torch.uint8, pin_memory=pinned)
        self._end = self._used = 0
        self._lengths: deque[int] = deque()
        """Of what is taken, with what was left out before it at the buffer's end."""
        self._changed = threading.Condition()

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self._bytes)

    @property
    def largest(self) -> int:
        """Bytes of a portion, at most: two always fit, wherever the first one lies."""
        return len(self._bytes) // 2 // ALIGNMENT * ALIGNMENT

    def take(self, size: int) -> Tensor:
        """Room for a portion, [size] bytes; waits until there is some."""
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
        """The room that was taken first."""
        with self._changed:
            self._used -= self._lengths.popleft()
            self._changed.notify()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
