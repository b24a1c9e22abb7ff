"""Two real processes, joined by gloo over the loopback interface."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.store import CheckpointStore

from tests.ports import free_port


def _train_on(ranks: int, config: PhaseConfig, folder: Path) -> None:
    file = folder / f"config-{ranks}.json"
    file.write_text(config.to_json())
    port = free_port()
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "pseudoreal_trainer.cli.rank", str(file)],
            env=dict(os.environ) | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(ranks)
    ]
    assert [process.wait(timeout=600) for process in processes] == [0] * ranks


def _newest(config: PhaseConfig) -> Reader:
    found = CheckpointStore(Path(config.work_directory), config.job.uid).newest(config.phase)
    assert found is not None
    return found


@pytest.fixture
def both(job_body: dict[str, Any], config: Any, train: Any, tmp_path: Path) -> tuple[Reader, Reader]:
    """The same phase on one rank and on two, with a micro-batch of three sequences that two ranks share unevenly."""
    job_body["spec"]["data"]["validation"] |= {"sequences": 30}
    one = config(0, "one")
    job_body["spec"]["phases"][0]["workers"] = 2
    two = config(0, "two")
    train(one)
    _train_on(2, two, tmp_path)
    return _newest(one), _newest(two)


def test_two_ranks_train_what_one_rank_trains(both: tuple[Reader, Reader]) -> None:
    one, two = both
    for name, array in one.whole().items():
        np.testing.assert_allclose(two.tensor(name), array, rtol=0, atol=1e-12)
    assert one.manifest.loss == pytest.approx(two.manifest.loss, rel=1e-12)
    assert one.manifest.start_validation_loss == two.manifest.start_validation_loss, "to the bit"
    assert one.manifest.validation_loss == pytest.approx(two.manifest.validation_loss, rel=1e-12)
