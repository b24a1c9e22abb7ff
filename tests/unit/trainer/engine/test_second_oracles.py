"""The engine against torch's own ways to train on several ranks, in float64. First moments are compared in addition to
weights, because they are proportional to the gradients; an update of AdamW hardly depends on the gradients' size."""

import pytest
import torch

from tests.unit.trainer.engine.support.cases import STEPS, Case
from tests.unit.trainer.engine.support.running import Result, want
from tests.unit.trainer.engine.support.torch_oracles import Trained, train_all

TRAININGS = [
    ("ScheduleLoopedBFS", Case(pipeline=2, micro_batches=4)),
    ("Schedule1F1B", Case(pipeline=2, micro_batches=4, order="1F1B")),
    ("fully_shard", Case(data=2, sharding="Full", micro_batches=2)),
    ("fully_shard", Case(data=2, sharding="Full", micro_batches=2, blocks=2, homes="hD", window=1)),
]
want(case for _, case in TRAININGS)
NAMES = [f"{name} {case.name}" for name, case in TRAININGS]


@pytest.fixture(scope="module")
def pairs(
    tmp_path_factory: pytest.TempPathFactory, engine_results: dict[Case, list[Result]]
) -> dict[str, tuple[Result, Trained]]:
    oracles = train_all(TRAININGS, tmp_path_factory.mktemp("oracles"))
    return {
        name: (engine_results[case][0], trained)
        for name, (_, case), trained in zip(NAMES, TRAININGS, oracles, strict=True)
    }


@pytest.mark.parametrize("name", NAMES)
def test_engine_trains_like_a_second_oracle(name: str, pairs: dict[str, tuple[Result, Trained]]) -> None:
    found, expected = pairs[name]
    assert len(found.losses) == STEPS
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    for mine, other in ((found.weights, expected.weights), (found.first_moments, expected.first_moments)):
        assert mine.keys() == other.keys()
        for parameter, tensor in other.items():
            torch.testing.assert_close(mine[parameter], tensor, rtol=0, atol=1e-12, msg=parameter)
