"""An allocator that remembers what it was asked for, and a GPU's part of an engine without a GPU."""

from typing import Any

import pytest
import torch
from pseudoreal_trainer.engine import engine
from pseudoreal_trainer.engine.state import store
from pseudoreal_trainer.engine.state.pinned import Allocator, PlainMemory
from torch import Tensor

from tests.unit.trainer.engine.recorded import RecordedLanes

_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like", "empty_strided")


class FakeMemory:
    """Memory without bytes, unless there is an allocator that has some."""

    def __init__(self, real: Allocator | None = None) -> None:
        self._real = real
        self.asked: list[int] = []
        """Bytes, in turn."""
        self.pinned = self.most = 0
        """Bytes, now and at most."""

    def allocate(self, size: int) -> Tensor:
        self.asked.append(size)
        self.pinned += size
        self.most = max(self.most, self.pinned)
        return torch.empty(size, dtype=torch.uint8, device="meta") if self._real is None else self._real.allocate(size)

    def free(self, memory: Tensor) -> None:
        self.pinned -= len(memory)


def pretend_gpu(patch: pytest.MonkeyPatch) -> FakeMemory:
    """Engines that are made from now on call what they would call for a GPU, and pin no memory but that of the result.

    Any thread that asks torch for pinned memory fails, also on a machine that has some.
    """
    # With its first device as a context torch notes its factories for good: they must be its own, not those below.
    with torch.device("cpu"):
        torch.empty(0)
    fake = FakeMemory(PlainMemory())
    patch.setattr(store, "allocator_for", lambda _: fake)
    patch.setattr(engine, "Lanes", lambda _: RecordedLanes(real=True))
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
