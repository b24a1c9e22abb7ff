"""The engine on an emulated machine: no access to memory races with another, on streams, threads and networks."""

from pathlib import Path

import pytest

from tests.support.depth import DEPTH
from tests.unit.trainer.engine.races.support.scenario import TrainedCase, run
from tests.unit.trainer.engine.races.support.scenarios import SCENARIOS
from tests.unit.trainer.engine.support import reference
from tests.unit.trainer.engine.support.cases import Case

SAMPLE = (
    *("all homes, clipped by unit", "offloaded activations, 1F1B", "groups of experts on disk"),
    *("shards in all homes", "a block on two stages", "groups over ranks", "balanced by step", "replicas of shards"),
    *("1F1B, on CPUs", "replicas of shards, on CPUs"),
)


@pytest.mark.parametrize("name", DEPTH.of(SAMPLE, tuple(SCENARIOS)))
def test_the_engine_has_no_race(name: str, tmp_path: Path) -> None:
    assert run(SCENARIOS[name], tmp_path).races == []


@pytest.mark.parametrize(
    "case", [Case(layers=2, homes="dh"), Case(layers=2, data=2, sharding="Full"), Case(layers=2, pipeline=2)]
)
def test_emulated_ranks_compute_the_losses_of_the_plain_loop(case: Case, tmp_path: Path) -> None:
    losses, _ = reference.train(case)
    outcome = run(TrainedCase(case), tmp_path)
    for of_rank in outcome.numbers:
        assert of_rank.losses == pytest.approx(losses[: len(of_rank.losses)], rel=1e-12)
        assert of_rank.losses
