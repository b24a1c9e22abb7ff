"""Layouts of two ranks over NCCL, each rank on its own GPU, against the plain reference."""

import pytest
import torch

from tests.gpu.conftest import Figure
from tests.unit.trainer.engine.support import reference
from tests.unit.trainer.engine.support.cases import Case
from tests.unit.trainer.engine.support.running import Result, run_cases

pytestmark = pytest.mark.gpu

CASES = [
    *(Case(pipeline=2, order=order, micro_batches=n) for order in ("Layered", "GPipe", "1F1B") for n in (1, 8)),
    *(Case(data=2, sharding=sharding) for sharding in ("None", "Optimizer", "Gradients", "Full")),
    *(Case(data=2, sharding="Full", homes=homes, window=3, micro_batches=8) for homes in ("d", "h", "D")),
    *(Case(pipeline=2, blocks=1, homes=homes, clipping="Global") for homes in ("d", "hD")),
    *(Case(pipeline=2, blocks=1, homes=homes, clipping="PerUnit") for homes in ("d", "h")),
    *(Case(pipeline=2, order=order, micro_batches=8, stash=True) for order in ("Layered", "1F1B", "Interleaved")),
    Case(data=2, sharding="Full", homes="h", clipping="PerUnit", stash=True, micro_batches=4),
    Case(pipeline=2, blocks=1, next_sharing=(4, "Cycle")),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, list[Result]]:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL gives each rank a GPU of its own, and this machine has only one")
    return run_cases(CASES, tmp_path_factory.mktemp("nccl"), "cuda")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_are_those_of_the_cpu(case: Case, results: dict[Case, list[Result]], figure: Figure) -> None:
    losses, weights = reference.train(case)
    figure(f"the last loss differs by {abs(results[case][0].losses[-1] / losses[-1] - 1):.1e}, relative")
    for found in results[case]:
        assert found.losses == pytest.approx(losses, rel=1e-10)
    for name, expected in weights.items():
        torch.testing.assert_close(results[case][0].weights[name], expected, rtol=0, atol=1e-9)
