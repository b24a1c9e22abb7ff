"""A rank that fails by itself says so and ends, whatever the others wait for."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port

SECONDS = 600
"""gloo gives up after half an hour."""


@pytest.mark.parametrize("clipping", ["None", "PerUnit", "Global"])
def test_it_does_not_wait_for_the_others(clipping: str, job_body: dict[str, Any], config: Any, tmp_path: Path) -> None:
    """Without a norm over all units, its side thread waits for the others' agreement when it fails."""
    job_body["spec"]["optimizer"]["clipping"] = {"mode": clipping}
    job_body["spec"]["phases"][0] |= {
        "sharing": {"blocks": 2},
        "workers": 2,
        "parallelism": {"pipeline": 2},
        "batch": {"sequences": 6, "microBatches": 3},
    }
    file = tmp_path / "config.json"
    file.write_text(config(0).to_json())
    port = str(free_port())
    ranks = [_start(rank, port, file, tmp_path / str(rank)) for rank in (0, 1)]
    try:
        assert ranks[0].wait(SECONDS) == 1
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    said = "".join(path.read_text() for path in (tmp_path / "0").glob("*.json"))
    assert "OSError: the disk has failed" in said
    assert "the disk has failed" in (tmp_path / "0" / "log").read_text()


def _start(rank: int, port: str, config: Path, folder: Path) -> "subprocess.Popen[bytes]":
    folder.mkdir()
    environment = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment |= {"RANK": str(rank), "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment |= {"PSEUDOREAL_OUTCOME_DIRECTORY": str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[4]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.unit.trainer.training.failing_worker", str(config)]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, env=dict(os.environ) | environment, stdout=log, stderr=log)
