"""A gradient while passes add to it: those of all micro-batches, and of a loss in chunks one for each chunk."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class GrowingGradient:
    """A gradient to which micro-batch after micro-batch adds its part."""

    flat: Tensor
    """Memory for the gradient, [padded numel], in the master type; what is added first overwrites what was in it."""
    views: list[Tensor]
    """Views of `flat`, one for each parameter, with its shape."""
    buffer: Tensor | None = None
    """The buffer that `flat` is a part of, to be given back; None: the gradient has memory of its own."""
    _begun: set[int] = field(default_factory=set)
    """Numbers of the parameters to which something was added."""

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Adds the gradients of one pass: one for each parameter, in their order and with their shapes, in the compute
        type. None: the pass has no part in that parameter's."""
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if index in self._begun:
                self.views[index].add_(gradient)
            else:
                self.views[index].copy_(gradient)
                self._begun.add(index)

    def complete(self) -> Tensor:
        """The whole gradient, [padded numel]: zero where no pass of this rank had a part in it, and in the padding."""
        for index, view in enumerate(self.views):
            if index not in self._begun:
                view.zero_()
        self.flat[sum(view.numel() for view in self.views) :].zero_()
        return self.flat
