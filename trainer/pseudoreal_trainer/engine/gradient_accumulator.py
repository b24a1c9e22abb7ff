"""Gradient accumulator of a unit: passes add one part per micro-batch, and a loss in chunks one part per chunk."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class GradientAccumulator:
    """Sum of the gradients of passes, one per micro-batch or chunk of the loss."""

    flat: Tensor
    """Memory of the gradient, [padded numel], in the master dtype; the first part overwrites its content."""
    views: list[Tensor]
    """Views of `flat`, one per parameter, with its shape."""
    buffer: Tensor | None = None
    """Buffer that `flat` is a part of, to be given back; None: the accumulator has its own memory."""
    _started: set[int] = field(default_factory=set)
    """Indices of the parameters to which a part was added."""

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one pass: one per parameter, in order and with its shape, in the compute dtype. None:
        the pass does not use the parameter."""
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if index in self._started:
                self.views[index].add_(gradient)
            else:
                self.views[index].copy_(gradient)
                self._started.add(index)

    def complete(self) -> Tensor:
        """Return the whole gradient, [padded numel]: zero for parameters that no pass used, and in the padding."""
        for index, view in enumerate(self.views):
            if index not in self._started:
                view.zero_()
        self.flat[sum(view.numel() for view in self.views) :].zero_()
        return self.flat
