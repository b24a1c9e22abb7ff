"""The state of a unit on this rank: master weights, two moments, and the gradient between reduction and update."""

from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pseudoreal_api.spec.optimizer import Optimizer as OptimizerSpec
from torch import Tensor

from pseudoreal_trainer.engine.ranks.lanes import Mark
from pseudoreal_trainer.engine.state.adamw import AdamW, Slices
from pseudoreal_trainer.engine.state.pinned import Slots
from pseudoreal_trainer.plan.units import Kind

Content = Literal["weights", "moments", "gradients"]
"""What bytes are kept for. Weights are counted in both types."""


@dataclass(frozen=True)
class Extent:
    """The part of a unit's flat vector that a state covers, and its types."""

    begin: int
    length: int
    decayed: int
    """Number of elements at its start on which weight decay acts."""
    master: torch.dtype
    compute: torch.dtype


class State(ABC):
    """A unit's state in its home. Only the side threads change it while a step runs."""

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self.steps = torch.zeros(())
        """Number of updates done, a scalar."""

    @abstractmethod
    def put(self, kind: Kind, values: Tensor) -> None:
        """Sets one of the three vectors, [length]."""

    @abstractmethod
    def part(self, kind: Kind, begin: int, end: int) -> Tensor:
        """The elements begin..end-1 of one of the three vectors, in the master type. They must not be changed, and are
        valid until the unit's next update; where the home is a disk, only until the next part of any unit is asked
        for."""

    @abstractmethod
    def compute_weights(self) -> Tensor:
        """The weights in the compute type, [length], where they live; valid until the next update."""

    @abstractmethod
    def keep_gradient(self, gradient: Tensor) -> None:
        """Takes the reduced gradient, [length], which the caller may then reuse."""

    @abstractmethod
    def gradient(self) -> Tensor:
        """The kept gradient, [length]. A change of it must be kept again."""

    def drop_gradient(self) -> None:  # noqa: B027
        """Forgets the kept gradient, whose update is left out."""

    def gradient_room(self) -> Tensor | None:
        """The memory, [length], in which `keep_gradient` puts the gradient, so that a reduction may write there at
        once; None where that is no memory."""
        return None

    def is_read(self) -> bool:
        """Whether `compute_weights` would return without waiting."""
        return True

    @abstractmethod
    def kept_bytes(self) -> dict[Content, int]:
        """Bytes in the home, padding included; where the state has a part of a larger vector, all of that vector."""

    @abstractmethod
    def update(self, spec: OptimizerSpec, rate: float, scale: float) -> None:
        """Updates the state with the kept gradient times `scale`, the clipping factor (at most 1)."""

    def read_ahead(self, after: Future[Any]) -> None:
        """Starts to read the compute weights when `after` is done; for homes from which reading takes long."""
        raise NotImplementedError(f"{type(self).__name__} has its weights in memory")

    def fetched(self, mark: Mark) -> None:  # noqa: B027
        """Notes that what `compute_weights` returned is no longer read after the mark."""

    def close(self) -> None:  # noqa: B027
        """Gives back what the process does not give back by itself."""


@dataclass(frozen=True)
class Vectors:
    """The vectors of a state in memory; all [length]. Some may be views into larger vectors."""

    weights: Tensor
    compute_weights: Tensor
    """The same tensor as `weights` when the types are the same."""
    gradient: Tensor | None
    """Where the reduced gradient is kept. None: it passes through a slot."""
    compute_parts: int = 1
    """Parts of the vector of which `compute_weights` is one, all of which this rank holds."""
    gradient_parts: int = 1


class MemoryState(State):
    """A state in the memory of the device or of the host."""

    def __init__(self, extent: Extent, vectors: Vectors, adamw: AdamW, slots: Slots) -> None:
        super().__init__(extent)
        self._vectors, self._adamw, self._slots = vectors, adamw, slots
        self._slot: Tensor | None = None
        device = vectors.weights.device
        first, second = (torch.zeros(extent.length, dtype=extent.master, device=device) for _ in range(2))
        self._kinds: dict[Kind, Tensor] = {
            "weights": vectors.weights,
            "first_moment": first,
            "second_moment": second,
        }
        self.steps = self.steps.to(device)

    def put(self, kind: Kind, values: Tensor) -> None:
        self._kinds[kind].copy_(values)
        if kind == "weights" and self._own_copy is not None:
            self._own_copy.copy_(self._kinds["weights"])

    def part(self, kind: Kind, begin: int, end: int) -> Tensor:
        return self._kinds[kind][begin:end]

    def compute_weights(self) -> Tensor:
        return self._vectors.compute_weights

    def keep_gradient(self, gradient: Tensor) -> None:
        if self._vectors.gradient is None:
            self._slot = self._slots.take()
        kept = self.gradient()
        if gradient.data_ptr() != kept.data_ptr():
            kept.copy_(gradient, non_blocking=True)

    def gradient(self) -> Tensor:
        if self._vectors.gradient is not None:
            return self._vectors.gradient
        assert self._slot is not None, "it was kept"
        return self._slot.view(self.extent.master)[: self.extent.length]

    def drop_gradient(self) -> None:
        if self._slot is not None:
            self._slots.give_back(self._slot)
            self._slot = None

    def gradient_room(self) -> Tensor | None:
        return self._vectors.gradient

    def kept_bytes(self) -> dict[Content, int]:
        vectors, (weights, first, second) = self._vectors, self._kinds.values()
        masters = 0 if self._own_copy is None else weights.nbytes
        gradient = 0 if vectors.gradient is None else vectors.gradient.nbytes
        return {
            "weights": masters + vectors.compute_weights.nbytes * vectors.compute_parts,
            "moments": first.nbytes + second.nbytes,
            "gradients": gradient * vectors.gradient_parts,
        }

    def update(self, spec: OptimizerSpec, rate: float, scale: float) -> None:
        weights, first, second = self._kinds.values()
        slices = Slices(weights, first, second, self.gradient(), self._own_copy, self.extent.decayed)
        try:
            self._adamw.update(spec, slices, self.steps, rate, scale)
        finally:
            self.drop_gradient()
        self.steps += 1

    @property
    def _own_copy(self) -> Tensor | None:
        """The weights in the compute type, where that differs from the master type; else None."""
        return None if self._vectors.compute_weights is self._vectors.weights else self._vectors.compute_weights
