"""Detect calls that would wait for a GPU, on a CPU."""

from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class HostReads(TorchFunctionMode):
    """Record the calls that read a tensor's values on the host; on a GPU each waits for all launched kernels."""

    METHODS = frozenset({"tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__", "cpu"})

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.METHODS:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class Waits(TorchDispatchMode):
    """Record the operations that, on CUDA, wait for the device to learn a value or the size of their result."""

    OPERATIONS = ("_local_scalar_dense", "bincount", "nonzero", "unique", "masked_select", "repeat_interleave.Tensor")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += [name for name in self.OPERATIONS if f"aten.{name}" in str(func)]
        return func(*args, **(kwargs or {}))
