"""An allocator that records requests, and the GPU's part of an engine without a GPU."""

from typing import Any

import pytest
import torch
from pseudoreal_trainer.engine import engine
from pseudoreal_trainer.engine.state import store
from pseudoreal_trainer.engine.state.pinned import Allocator, PlainMemory
from torch import Tensor

from tests.unit.trainer.engine.support.recorded import RecordedStreams

_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like", "empty_strided")


class FakeMemory:
    """Memory without bytes, unless a real allocator is given."""

    def __init__(self, real: Allocator | None = None) -> None:
        self._real = real
        self.asked: list[int] = []
        """Requested bytes, in order."""
        self.pinned = self.most = 0
        """Pinned bytes, now and at most."""

    def allocate(self, size: int) -> Tensor:
        self.asked.append(size)
        self.pinned += size
        self.most = max(self.most, self.pinned)
        return torch.empty(size, dtype=torch.uint8, device="meta") if self._real is None else self._real.allocate(size)

    def free(self, memory: Tensor) -> None:
        self.pinned -= len(memory)


def pretend_gpu(patch: pytest.MonkeyPatch) -> FakeMemory:
    """Make new engines call everything that they would call for a GPU; the returned allocator is the only one that pins
    memory.

    A thread that asks torch for pinned memory fails, even on a machine with a GPU.
    """
    # When a device is first used as a context, torch records its factory functions for good: do this before the
    # patches.
    with torch.device("cpu"):
        torch.empty(0)
    fake = FakeMemory(PlainMemory())
    patch.setattr(store, "allocator_for", lambda _: fake)
    patch.setattr(engine, "Streams", lambda _: RecordedStreams(real=True))
    patch.setattr(Tensor, "pin_memory", _refuse)
    for name in _FACTORIES:
        patch.setattr(torch, name, _without_pinning(getattr(torch, name)))
    return fake


def _refuse(*_: Any, **__: Any) -> Tensor:
    raise AssertionError("torch pins as much as the next power of two")


def _without_pinning(make: Any) -> Any:
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return _refuse() if pin_memory else make(*args, **kwargs)

    return made
