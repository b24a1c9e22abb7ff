"""AdamW over the master weights, with its state as named arrays."""

from dataclasses import dataclass

import torch
from pseudoreal_api.model_spec import Optimizer as OptimizerSpec
from torch import Tensor, nn

# The function, not the class torch.optim.AdamW: the same kernel, but the class imports torch's compiler when it is
# made, which takes longer than everything else that a short phase does to start.
from torch.optim.adamw import adamw

from pseudoreal_trainer.checkpoint import FIRST_MOMENT, SECOND_MOMENT, STEP, Arrays

_EPSILON = 1e-8


@dataclass(frozen=True)
class _Slot:
    """A parameter and its state."""

    parameter: nn.Parameter
    first_moment: Tensor
    second_moment: Tensor
    step: Tensor
    """Updates done; a scalar, for the bias correction."""


class Optimizer:
    """Weight decay acts on matrices (the embedding and the head among them), not on the norms' vectors."""

    def __init__(self, model: nn.Module, spec: OptimizerSpec, state: Arrays | None) -> None:
        """`state`: what `arrays` gave; None for a model that has not been trained."""
        self._spec = spec
        self._slots = {name: _slot(name, parameter, state) for name, parameter in model.named_parameters()}

    def arrays(self) -> Arrays:
        """`<parameter>.<kind>` -> array"""
        arrays: Arrays = {}
        for name, slot in self._slots.items():
            kinds = {FIRST_MOMENT: slot.first_moment, SECOND_MOMENT: slot.second_moment, STEP: slot.step}
            arrays |= {f"{name}.{kind}": tensor.cpu().numpy() for kind, tensor in kinds.items()}
        return arrays

    def update(self, rate: float) -> None:
        """Clips the gradients and makes one step with this learning rate."""
        if self._spec.clipping.mode == "global":
            parameters = [slot.parameter for slot in self._slots.values()]
            nn.utils.clip_grad_norm_(parameters, float(self._spec.clipping.norm))
        matrices = [slot for slot in self._slots.values() if slot.parameter.ndim == 2]
        vectors = [slot for slot in self._slots.values() if slot.parameter.ndim != 2]
        self._adamw(matrices, rate, float(self._spec.weight_decay))
        self._adamw(vectors, rate, 0.0)

    @torch.no_grad()
    def _adamw(self, slots: list[_Slot], rate: float, weight_decay: float) -> None:
        adamw(
            [slot.parameter for slot in slots],
            [slot.parameter.grad for slot in slots if slot.parameter.grad is not None],
            [slot.first_moment for slot in slots],
            [slot.second_moment for slot in slots],
            [],
            [slot.step for slot in slots],
            fused=True,
            amsgrad=False,
            beta1=float(self._spec.beta1),
            beta2=float(self._spec.beta2),
            lr=rate,
            weight_decay=weight_decay,
            eps=_EPSILON,
            maximize=False,
        )


def _slot(name: str, parameter: nn.Parameter, state: Arrays | None) -> _Slot:
    if state is None:
        zeros = torch.zeros_like(parameter, requires_grad=False)
        return _Slot(parameter, zeros, zeros.clone(), torch.zeros((), device=parameter.device))
    first, second, step = (
        torch.from_numpy(state[f"{name}.{kind}"]).to(parameter.device, copy=True)
        for kind in (FIRST_MOMENT, SECOND_MOMENT, STEP)
    )
    return _Slot(parameter, first, second, step)
