"""With nonFinite Skip, every layout skips the same updates as a plain loop, bitwise."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from pseudoreal_trainer.engine.gradients import ReductionThread
from pseudoreal_trainer.engine.state.memory import Shard

from tests.support.forked import run_ranks
from tests.unit.trainer.engine.support import not_finite
from tests.unit.trainer.engine.support.cases import STEPS, WIDE
from tests.unit.trainer.engine.support.not_finite import FAULTS, SkippingCase
from tests.unit.trainer.engine.support.running import Result, bring_together

CLIPPINGS, HOMES = ("Global", "PerUnit", "None"), ("d", "h", "D")
FLOAT = "float32"
ONE_RANK = [SkippingCase(clipping=c, homes=h, precision=FLOAT) for c in CLIPPINGS for h in HOMES]
ONE_RANK += [SkippingCase(clipping="PerUnit", homes="hD", precision=FLOAT, moments="BFloat16")]
ONE_RANK += [
    SkippingCase(clipping=mode, homes="hD", precision=FLOAT, gradients="BFloat16") for mode in ("Global", "None")
]
ONE_RANK += [SkippingCase(clipping="PerUnit", homes="hD", precision=FLOAT, moments="Float8", drawn=WIDE)]
ONE_RANK += [SkippingCase(clipping="Global", norm="100", speculates=True, homes="h", precision=FLOAT)]
TWO_RANKS = [
    *(SkippingCase(clipping=c, homes=h, precision=FLOAT, data=2, sharding="Full") for c in CLIPPINGS for h in HOMES),
    *(SkippingCase(clipping=c, homes=h, precision=FLOAT, pipeline=2) for c in CLIPPINGS for h in HOMES),
    *(SkippingCase(clipping=c, precision=FLOAT, data=2) for c in CLIPPINGS),
    # The stages share the block, whose gradient is summed over them.
    *(SkippingCase(clipping=c, precision=FLOAT, pipeline=2, layers=2, blocks=1, micro_batches=1) for c in CLIPPINGS),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[SkippingCase, list[Result]]:
    folder, found = tmp_path_factory.mktemp("engine"), {}
    for world, cases in ((1, ONE_RANK), (2, TWO_RANKS)):
        run_ranks(not_finite.run, world, world, cases, folder)
        ranks = [torch.load(folder / f"{world}-{rank}.pt", weights_only=False) for rank in range(world)]
        for index, case in enumerate(cases):
            found[case] = [results[index] for results in ranks]
            bring_together(case, found[case])
    return found


@pytest.mark.parametrize("case", [*ONE_RANK, *TWO_RANKS], ids=lambda case: case.name)
def test_the_same_updates_are_skipped_in_every_layout(
    case: SkippingCase, results: dict[SkippingCase, list[Result]]
) -> None:
    expected = not_finite.train(case)
    for name, found in results[case][0].weights.items():
        assert torch.equal(found, expected[name]), name
        assert found.isfinite().all()


@pytest.mark.parametrize("case", [*ONE_RANK, *TWO_RANKS], ids=lambda case: case.name)
def test_every_rank_knows_which_updates_were_skipped(
    case: SkippingCase, results: dict[SkippingCase, list[Result]]
) -> None:
    units, block = case.layout.units, min(2, case.layout.units - 2)
    everything, only = tuple(range(units)), {"blocks.1": (block,), "head": (units - 1,)}
    for rank in results[case]:
        for step in range(STEPS):
            expected = () if step not in FAULTS else everything if case.clipping == "Global" else only[FAULTS[step][0]]
            assert rank.skipped[step] == expected


@pytest.mark.parametrize(("moments", "largest"), [("float32", 3.4e38), ("bfloat16", 3.38e38), ("uint8", 3.19e38)])
def test_a_gradient_whose_second_moment_would_not_be_finite_is_skipped(moments: str, largest: float) -> None:
    """The largest bfloat16 is below the largest float32, and the largest number of a block is below both."""
    skipped: list[int] = []
    shard = Shard(0, 1, (), torch.float32, torch.float32, getattr(torch, moments))

    def is_skipped(square: float) -> bool:
        thread = SimpleNamespace(
            _agreement=SimpleNamespace(trains=True),
            _layout=SimpleNamespace(clipping="None"),
            _store=SimpleNamespace(states=[SimpleNamespace(shard=shard)]),
            _square_of_unit=lambda _: square,
            _skip_or_fail=skipped.append,
            _factor_for=lambda _: 1.0,
        )
        return ReductionThread._clip_factor(cast(ReductionThread, thread), 0) is None

    assert not is_skipped(largest)
    assert is_skipped(3.395e38) == (moments != "float32")
    assert is_skipped(3.5e38)
    assert len(skipped) == 1 + (moments != "float32")
