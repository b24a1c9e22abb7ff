"""A hard limit on memory, below the state of the job and above the memory that a job with the disk as home needs."""

import json
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.plan.units import units_of

from tests.unit.trainer.engine.support.capped import baseline, environment

MIB = 1 << 20
STATE_OF_A_PARAMETER = 16
"""Bytes per parameter: weight, two moments and gradient in float32."""
ROOM_OF_THE_STATE = 0.7
"""Share of the state for which the limit leaves room, in addition to the needs of the program itself."""
DISK = 3 << 30


@pytest.fixture
def large(job_body: dict[str, Any], config: Callable[..., PhaseConfig], tmp_path: Path) -> Iterator[Any]:
    """Configurations of a job with 38 million parameters, 600 MB of state, for two training steps on few tokens."""
    if shutil.disk_usage(tmp_path).free < DISK:
        pytest.skip(f"needs {DISK:,} bytes in {tmp_path}")
    spec = job_body["spec"]
    spec["model"] = {
        "layers": 12,
        "hiddenSize": 512,
        "attention": {"heads": 8},
        "sequenceLength": 16,
        "feedForward": {"size": 2048},
    }
    spec["precision"] = {"compute": "float32"}
    spec["data"]["validation"] |= {"sequences": 2, "everySteps": 100}
    spec["checkpoint"]["bufferBytes"] = "16Mi"
    spec["phases"] = [{"name": "real", "until": {"step": 2}, "batch": {"sequences": 2, "microBatches": 2}}]

    def make(name: str, home: str) -> PhaseConfig:
        spec["phases"][0]["offload"] = {"home": home, "window": 1}
        return config(0, name)

    yield make
    for name in ("whole", "capped", "disk"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)


def _train(config: PhaseConfig, folder: Path, limit: int = resource.RLIM_INFINITY) -> subprocess.CompletedProcess[str]:
    file = folder / f"{Path(config.work_directory).name}.json"
    file.write_text(config.to_json())
    command = [sys.executable, "-m", "pseudoreal_trainer.cli.rank", str(file)]
    return subprocess.run(
        command,
        env=environment() | {"PSEUDOREAL_OUTCOME_DIRECTORY": str(folder)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )


def _losses(config: PhaseConfig) -> list[float]:
    lines = (Path(config.work_directory) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_a_state_larger_than_the_memory_trains_from_the_disk(large: Any, tmp_path: Path) -> None:
    whole, capped, disk = large("whole", "Device"), large("capped", "Device"), large("disk", "Disk")
    parameters = sum(unit.numel for unit in units_of(whole.model, Sharing(blocks=whole.model.layers)))
    state = STATE_OF_A_PARAMETER * parameters
    assert state > 500 * MIB
    limit = baseline() + round(ROOM_OF_THE_STATE * state)

    unlimited = _train(whole, tmp_path)
    assert unlimited.returncode == 0, unlimited.stdout
    failed = _train(capped, tmp_path, limit)
    assert failed.returncode == 71, failed.stdout
    message = json.loads((tmp_path / "0.json").read_text())["message"]
    assert message["outcome"] == "OutOfMemory"
    assert re.search(
        r"out of memory: asked for \S+ MiB, this rank used \S+ .iB, and may have \S+ .iB of data",
        message["message"],
    )
    assert "set spec.phases[real].offload.home: Disk" in message["message"]
    from_disk = _train(disk, tmp_path, limit)
    assert from_disk.returncode == 0, from_disk.stdout
    assert _losses(disk) == _losses(whole)
    assert len(_losses(whole)) == 2
