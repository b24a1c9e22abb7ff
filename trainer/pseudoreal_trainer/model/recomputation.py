"""Selective recomputation: tensors that are cheap to compute again are not kept for the backward pass (Korthikanti et
al. 2022, arXiv 2205.05198).

A module marks such a tensor with `mark_recomputed`. In the context of `recomputing`, the hooks that pack and unpack
autograd's saved tensors ask this module: `pack` replaces a marked tensor by a recipe, and `unpack` follows the recipe.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Recipe:
    """Computation of a marked tensor."""

    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    """Arguments of the function. Autograd keeps them too, for the backward pass of the function itself."""

    @cached_property
    def result(self) -> Tensor:
        """The marked tensor, computed again. Autograd frees a placeholder when the operation that saved it has run
        backwards. So the result is freed, together with the recipe, after the last of these operations."""
        with torch.no_grad():
            return self.function(*self.inputs)


@dataclass(frozen=True)
class Recomputed:
    """Placeholder that autograd saves for a marked tensor, or for a view of it."""

    recipe: Recipe
    _size: torch.Size
    _stride: tuple[int, ...]
    _offset: int

    def unpack(self) -> Tensor:
        """Return the saved tensor."""
        return self.recipe.result.as_strided(self._size, self._stride, self._offset)


@dataclass
class _Marks:
    recipes: dict[int, tuple[weakref.ref[Tensor], Recipe]] = field(default_factory=dict)
    """Address of a storage -> the marked tensor in it, and the tensor's recipe. An entry counts only while the tensor
    lives: then no other tensor has its address."""


_marks: _Marks | None = None
"""Marks of the running pass; None: the pass recomputes no marked tensors. Main thread only."""


@contextmanager
def recomputing(*, enabled: bool) -> Iterator[None]:
    """Context of a forward pass with a graph. If `enabled` is false, marks have no effect."""
    global _marks
    before, _marks = _marks, _Marks() if enabled else None
    try:
        yield
    finally:
        _marks = before


def mark_recomputed(tensor: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return `tensor`, the result of `function(*inputs)`. The backward pass computes the tensor again, if it runs under
    `recomputing`. The result must have a storage of its own, and the inputs must be kept for the backward pass."""
    if _marks is not None:
        recipe = Recipe(function, tuple(each.detach() for each in inputs))
        _marks.recipes[_address(tensor)] = (weakref.ref(tensor), recipe)
    return tensor


def pack(tensor: Tensor) -> Recomputed | None:
    """Return the placeholder for a tensor that autograd saves; None: the tensor itself must be kept."""
    # All empty storages have the address 0.
    if _marks is None or not tensor.numel() or (entry := _marks.recipes.get(_address(tensor))) is None:
        return None
    marked, recipe = entry
    if marked() is None:
        return None
    return Recomputed(recipe, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
