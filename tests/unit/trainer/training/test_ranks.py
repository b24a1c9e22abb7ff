"""Training on two real processes, connected by gloo over the loopback interface."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.checkpoint.reader import Reader

from tests.support.checkpoints import newest_of
from tests.support.forked import start_rank
from tests.support.ports import free_port
from tests.support.processes import succeed


def _train_on(ranks: int, config: PhaseConfig, folder: Path) -> None:
    file, port = folder / "config.json", free_port()
    file.write_text(config.to_json())
    succeed(start_rank(file, rank, ranks, port, folder / str(rank)) for rank in range(ranks))


@pytest.fixture
def both(job_body: dict[str, Any], config: Any, train: Any, tmp_path: Path) -> tuple[Reader, Reader]:
    """Train the same phase on one rank and on two. A micro-batch has three sequences, which the two ranks share
    unevenly."""
    job_body["spec"]["data"]["validation"] |= {"sequences": 30}
    one = config(0, "one")
    job_body["spec"]["phases"][0]["workers"] = 2
    two = config(0, "two")
    train(one)
    _train_on(2, two, tmp_path)
    return newest_of(one), newest_of(two)


def test_two_ranks_train_what_one_rank_trains(both: tuple[Reader, Reader]) -> None:
    one, two = both
    for name, array in one.whole().items():
        np.testing.assert_allclose(two.tensor(name), array, rtol=0, atol=1e-12)
    assert one.manifest.loss == pytest.approx(two.manifest.loss, rel=1e-12)
    assert one.manifest.start_validation_loss == two.manifest.start_validation_loss, "equal to the bit"
    assert one.manifest.validation_loss == pytest.approx(two.manifest.validation_loss, rel=1e-12)
