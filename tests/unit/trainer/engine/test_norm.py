"""With gradients that are all 1, the norm is the root of the number of parameters in every mesh: no parameter counts
twice."""

from dataclasses import replace
from math import sqrt
from pathlib import Path

import pytest
import torch
from pseudoreal_trainer.plan.units import units_of

from tests.support.depth import DEPTH
from tests.support.forked import run_ranks
from tests.unit.trainer.engine.support import ones
from tests.unit.trainer.engine.support.cases import EIGHT_IN_BALANCE, Case

SHARDINGS = ("None", "Optimizer", "Gradients", "Full")
MOST = DEPTH.of(4, 8)
"""Number of ranks."""
MESHES = [(p, r, s) for p in (1, 2, 4) for r in (1, 2, 4, 8) for s in (1, 2, 4, 8) if p * r * s <= MOST]
"""Pipeline ranks, replicas, shards."""
IN_BALANCE = Case(clipping="Global", options="in balance")
SPREAD = Case(part="Experts", blocks=1, clipping="Global", drawn=EIGHT_IN_BALANCE)
CASES = [
    replace(IN_BALANCE, pipeline=p, data=r * s, replicas=r, sharding=sharding, blocks=blocks, order=order)
    for p, r, s in MESHES
    for sharding in (SHARDINGS if r == 1 else SHARDINGS[1:])
    # With one dense layer in two, every other layer has the same block.
    for blocks in ((2, 4) if sharding == "Full" else (2,))
    # In this order both pipeline ranks have both blocks.
    for order in (("Layered", "GPipe") if p == blocks == 2 else ("Layered",))
] + [
    replace(SPREAD, pipeline=p, data=r * s, replicas=r, expert_ranks=e, sharding=sharding)
    for p, r, s in MESHES
    for e in (2, 4)
    if s % e == 0
    for sharding in (SHARDINGS if r == 1 else SHARDINGS[1:])
]


@pytest.fixture(scope="module")
def norms(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, list[float]]:
    """Case -> norm on each rank."""
    folder, found = tmp_path_factory.mktemp("norms"), dict[Case, list[float]]()
    for world in sorted({case.world for case in CASES}):
        cases = [case for case in CASES if case.world == world]
        run_ranks(ones.run, world, world, cases, folder)
        ranks = [torch.load(Path(folder / f"{world}-{rank}.pt"), weights_only=False) for rank in range(world)]
        found |= {case: [said[index] for said in ranks] for index, case in enumerate(cases)}
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_norm_of_a_gradient_of_ones_is_exact_in_every_layout(case: Case, norms: dict[Case, list[float]]) -> None:
    parameters = sum(unit.trained for unit in units_of(case.model, case.sharing))
    assert norms[case] == pytest.approx([sqrt(parameters)] * case.world, rel=1e-12)
