"""On a real GPU, a step with a concurrent checkpoint pins exactly the planned bytes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pseudoreal_trainer.checkpoint.pieces import spans_of
from pseudoreal_trainer.engine.passes import Training
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.plan.lower import step_plan
from pseudoreal_trainer.plan.memory.activations import activation_peak
from pseudoreal_trainer.plan.memory.tiers import resident_bytes
from pseudoreal_trainer.plan.units import Kind
from torch import Tensor

from tests.gpu.conftest import Figure
from tests.unit.trainer.engine.support.cases import RATE, Case
from tests.unit.trainer.engine.support.running import CaseBatch, make_engine
from tests.unit.trainer.plan.memory.support.sizes_of_case import sizes_of

pytestmark = pytest.mark.gpu

RING = 100_000
SCALARS = 1 << 16
"""Bytes that torch may pin for itself, for instance for values read back."""


class _Nowhere:
    def write(self, kind: Kind, content: Tensor) -> None:
        pass


@pytest.mark.parametrize("homes", ["hd", "hD"])
def test_pinned_bytes_equal_the_plan(homes: str, gpu: torch.device, figure: Figure, tmp_path: Path) -> None:
    case = Case(precision="bfloat16", homes=homes, clipping="Global", stash=True, micro_batches=3)
    engine, batch = make_engine(case, Ranks(0, 1, gpu), tmp_path), CaseBatch(case, 0, 0, torch.device("cpu"))
    for step in range(2):
        engine.train(batch, Training(100, RATE, stop=False), step)
    saved = engine.state.capture(spans_of(case.layout, engine.units, 0), _Nowhere(), RING)
    engine.train(batch, Training(100, RATE, stop=False), 2)
    saved.result()
    sizes = replace(sizes_of(case), device="accelerator", checkpoint_buffer=RING)
    planned = resident_bytes(case.layout, sizes, 0) + activation_peak(case.layout, sizes, 0, step_plan(case.layout)[0])
    pinned = engine.state.memory_report().pinned
    by_torch = int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
    engine.close()
    figure(f"{pinned} bytes, {planned.pinned} planned; torch pins {by_torch} besides")
    assert pinned == planned.pinned
    assert by_torch <= SCALARS
    assert engine.state.memory_report().pinned == 0
