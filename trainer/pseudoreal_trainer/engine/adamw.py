"""AdamW over a range of a flat vector."""

from dataclasses import dataclass

import torch
from pseudoreal_api.model_spec import Optimizer as OptimizerSpec
from torch import Tensor

# The function, not the class torch.optim.AdamW: the same kernel, but the class imports torch's compiler when it is
# made, which takes longer than everything else that a short phase does to start.
from torch.optim.adamw import adamw

_EPSILON = 1e-8


@dataclass(frozen=True)
class Slices:
    """A range of a unit's flat vector with its moments and gradient; all 1-D, of one length and one type."""

    weights: Tensor
    first_moment: Tensor
    second_moment: Tensor
    gradient: Tensor
    decayed: int
    """Elements at the start on which weight decay acts."""

    def part(self, begin: int, end: int) -> list[list[Tensor]]:
        tensors = (self.weights, self.gradient, self.first_moment, self.second_moment)
        return [[tensor[begin:end]] for tensor in tensors]


@torch.no_grad()
def update(spec: OptimizerSpec, slices: Slices, steps: Tensor, rate: float) -> None:
    """One step in place (Loshchilov and Hutter, arXiv 1711.05101). `steps`: steps done before, a scalar; not changed.

    Every element is updated by itself, so cuts of a vector into ranges do not matter: to the bit where each begins at a
    multiple of the processor's vectors (16 elements at most), whose rests are rounded in another way.
    """
    decays = ((0, slices.decayed, float(spec.weight_decay)), (slices.decayed, len(slices.weights), 0.0))
    for begin, end, decay in decays:
        if begin < end:
            weights, gradients, first_moments, second_moments = slices.part(begin, end)
            adamw(
                weights,
                gradients,
                first_moments,
                second_moments,
                [],
                [steps.clone()],
                fused=True,
                amsgrad=False,
                beta1=float(spec.beta1),
                beta2=float(spec.beta2),
                lr=rate,
                weight_decay=decay,
                eps=_EPSILON,
                maximize=False,
            )
