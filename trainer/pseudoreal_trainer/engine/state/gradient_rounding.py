"""Rounding of summed gradients to the nearest bfloat16, ties to even.

A gradient is summed over micro-batches and ranks in the master dtype, and rounded once (a float64 sum first to
float32, as torch converts). The layout decides where a
gradient is kept, but not its value: gradients that stay on the device are rounded as well.
"""

import torch
from torch import Tensor

from pseudoreal_trainer.plan.sizes import rounded_elements


class GradientRounding:
    """Rounds one gradient at a time, in scratch memory of a fixed size. Reduction thread only."""

    def __init__(self, longest: int, device: torch.device) -> None:
        """`longest`: length of the longest gradient, in elements; the scratch memory need not be longer."""
        elements = rounded_elements(longest, "cpu" if device.type == "cpu" else "accelerator")
        self._scratch = torch.empty(elements, dtype=torch.bfloat16, device=device)

    def round(self, gradient: Tensor) -> None:
        """Round all elements, [n], in place."""
        for part in gradient.split(len(self._scratch)):
            part.copy_(self._scratch[: len(part)].copy_(part))

    def pack(self, gradient: Tensor) -> Tensor:
        """Return a rounded gradient as bfloat16, [n], at the start of the memory of `gradient`, [n], which is lost."""
        packed = gradient.view(torch.bfloat16)[: len(gradient)]
        # Ascending: a part is written to memory of parts that are read already. The scratch memory keeps the first part
        # from being overwritten while it is read.
        for part, target in zip(gradient.split(len(self._scratch)), packed.split(len(self._scratch)), strict=True):
            target.copy_(self._scratch[: len(part)].copy_(part))
        return packed
