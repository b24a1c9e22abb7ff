"""Gradients that are not finite, in the engine of one rank and in a plain loop that skips the same updates."""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from unittest.mock import patch

import torch
from pseudoreal_api.spec.optimizer import Clipping
from pseudoreal_api.spec.optimizer import Optimizer as OptimizerSpec
from pseudoreal_trainer.engine.gradients import Gradients
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.model.reference import Transformer
from torch import Tensor

from tests.support.rounding import round_moments
from tests.unit.trainer.engine.support import reference
from tests.unit.trainer.engine.support.cases import SEED, STEPS, Case
from tests.unit.trainer.engine.support.running import run_case

FAULTS = {1: ("blocks.1", nan), 3: ("head", inf)}
"""Step -> unit with one spoilt element in its gradient, and the value of that element."""


@dataclass(frozen=True)
class SkippingCase(Case):
    @property
    def optimizer(self) -> OptimizerSpec:
        # No norm reaches this bound: the clip factor is exactly 1, in whatever order the norm is summed.
        clipping = Clipping(mode=self.clipping, norm="1000")
        return OptimizerSpec(clipping=clipping, non_finite="Skip", moments=self.moments)


def spoilt(case: Case) -> AbstractContextManager[object]:
    """Context in which the last data rank spoils the first gradients of FAULTS: a block's gradient of one micro-batch,
    and the gradient of the head's matrix."""
    accumulate, seen = Gradients.accumulate, Counter[tuple[int, int]]()
    names = {"blocks.1": min(2, case.layout.units - 2), "head": case.layout.units - 1}

    def spoil(self: Gradients, unit: int, gradients: Sequence[Tensor | None]) -> None:
        step = self._trace._step
        seen[step, unit] += 1
        if step in FAULTS and seen[step, unit] == 1 and self._groups.data_rank == case.data - 1:
            name, value = FAULTS[step]
            if names[name] == unit:
                first, *others = gradients
                assert first is not None, "the first parameter of a unit is a matrix, and has a gradient"
                changed = first.clone()
                changed.view(-1)[3] = value
                gradients = [changed, *others]
        accumulate(self, unit, gradients)

    return patch.object(Gradients, "accumulate", spoil)


def run(rank: int, world: int, cases: list["SkippingCase"], folder: Path) -> None:
    """Run the cases on the engine, one after the other."""
    ranks, results = Ranks(rank, world, torch.device("cpu")), []
    for case in cases:
        with spoilt(case):
            results.append(run_case(case, ranks, folder))
    torch.save(results, folder / f"{world}-{rank}.pt")


def train(case: SkippingCase) -> dict[str, Tensor]:
    """Return the weights after an ordinary loop: torch.optim.AdamW skips parameters without a gradient."""
    model, optimizer = reference.model_and_optimizer(case)
    for step in range(STEPS):
        reference.set_gradients(model, case, step)
        reference.round_gradients(model, case)
        if step in FAULTS:
            _leave_out(model, case, FAULTS[step][0])
        optimizer.step()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                updates = int(optimizer.state[parameter]["step"])
                round_moments({name: parameter}, optimizer, SEED, updates, case.moments)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _leave_out(model: Transformer, case: Case, unit: str) -> None:
    block = "blocks.1." if case.layout.units > 3 else "blocks.0."
    tensors = {"blocks.1": (block,), "head": ("head.", "norm.")}[unit]
    for name, parameter in model.named_parameters():
        if case.clipping == "Global" or name.startswith(tensors):
            parameter.grad = None
