"""The warm-up multiplies matrices of every shape and layout in a step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pseudoreal_trainer.engine.passes import PlanRun, Training
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.engine.warm_up import WarmUp
from pseudoreal_trainer.plan.lower import step_plan
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.trainer.engine.support.cases import RATE, Case
from tests.unit.trainer.engine.support.running import CaseBatch, make_engine

CPU = torch.device("cpu")
TRAINING = Training(100, RATE, stop=False)
Product = tuple[str, tuple[tuple[torch.Size, tuple[int, ...]], ...]]
"""Operator, and the shape and the strides of each operand: kernels differ by both."""


class _Products(TorchDispatchMode):
    """Records the products of matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[Product] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            operands = tuple((arg.shape, arg.stride()) for arg in args if isinstance(arg, torch.Tensor))
            self.found.add((str(function), operands))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "case",
    [Case(), Case(sequence_chunks=2), Case(keep="All"), Case(options="OLMo2"), Case(activation="SwiGLU")],
    ids=lambda case: case.name,
)
def test_the_warm_up_multiplies_all_shapes_of_a_step(case: Case, tmp_path: Path) -> None:
    engine, batch = make_engine(case, Ranks(0, 1, CPU), tmp_path), CaseBatch(case, 0, 0, CPU)
    executor = engine._executor
    with _Products() as warm:
        WarmUp(executor._passes).run(PlanRun(batch, TRAINING), step_plan(case.layout)[0])
    with _Products() as step:
        engine.train(batch, TRAINING, 0)
        engine.state.wait_for_updates()
    engine.close()
    assert step.found
    assert step.found <= warm.found
