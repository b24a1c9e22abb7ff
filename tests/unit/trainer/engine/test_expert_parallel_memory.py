"""A thousand experts per layer over four ranks, with a hard limit on each rank's memory, train from the disk."""

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_api.wire.messages import ExitCode
from pseudoreal_trainer.plan.units import units_of

from tests.support.ports import free_port
from tests.unit.trainer.engine.support.capped import baseline, environment

pytestmark = pytest.mark.long

RANKS, LAYERS = 4, 8
STATE_OF_A_PARAMETER = 16
"""Bytes per parameter: weight, two moments and gradient in float32."""
ROOM_OF_THE_STATE = 0.6
"""Share of a rank's state for which the limit leaves room, in addition to the needs of the program itself."""
STACK = 256 << 10
"""Stack of each thread in bytes, which counts as data."""


def _make_config(job_body: dict[str, Any], config: Callable[..., PhaseConfig], name: str, home: str) -> PhaseConfig:
    spec = job_body["spec"]
    spec["model"] = {
        "layers": LAYERS,
        "hiddenSize": 64,
        "attention": {"heads": 2},
        "sequenceLength": 16,
        "feedForward": {"size": 144},
        "experts": {"count": 1024, "prototypes": 4},
    }
    spec["precision"] = {"compute": "float32"}
    spec["data"]["validation"] |= {"sequences": 4, "everySteps": 100}
    spec["checkpoint"]["bufferBytes"] = "4Mi"
    spec["optimizer"] = {"clipping": {"mode": "PerUnit"}}
    spec["phases"] = [
        {
            "name": "real",
            "until": {"step": 2},
            "workers": RANKS,
            "batch": {"sequences": 8, "microBatches": 2},
            "parallelism": {"expertRanks": RANKS},
            "offload": {"home": home, "window": 1},
        }
    ]
    return config(0, name)


def _train(config: PhaseConfig, folder: Path, limit: int = resource.RLIM_INFINITY) -> list[int]:
    """Train on all ranks and return their exit codes."""
    file = folder / f"{Path(config.work_directory).name}.json"
    file.write_text(config.to_json())
    port = free_port()

    def limit_memory() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (STACK, STACK))
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    started = []
    for rank in range(RANKS):
        outcomes = folder / f"{file.stem}-{rank}"
        outcomes.mkdir()
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        own |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "PSEUDOREAL_OUTCOME_DIRECTORY": str(outcomes)}
        command = [sys.executable, "-m", "pseudoreal_trainer.cli.rank", str(file)]
        log = (folder / f"{file.stem}-{rank}.log").open("w")
        started.append(
            subprocess.Popen(
                command, env=environment() | own, preexec_fn=limit_memory, stdout=log, stderr=subprocess.STDOUT
            )
        )
    return [process.wait(timeout=900) for process in started]


def _losses(config: PhaseConfig) -> list[float]:
    lines = (Path(config.work_directory) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_a_thousand_experts_per_layer_train_from_the_disk(
    job_body: dict[str, Any], config: Callable[..., PhaseConfig], tmp_path: Path
) -> None:
    whole, capped, disk = (
        _make_config(job_body, config, *each) for each in (("whole", "Device"), ("capped", "Device"), ("disk", "Disk"))
    )
    parameters = sum(unit.numel for unit in units_of(whole.model, Sharing(blocks=LAYERS)) if unit.is_experts)
    state = STATE_OF_A_PARAMETER * parameters // RANKS
    limit = baseline() + round(ROOM_OF_THE_STATE * state)

    assert _train(whole, tmp_path) == [0] * RANKS
    assert _train(capped, tmp_path, limit) == [ExitCode.OUT_OF_MEMORY] * RANKS
    from_disk = _train(disk, tmp_path, limit)
    assert from_disk == [0] * RANKS, (tmp_path / "disk-0.log").read_text()
    assert len(_losses(whole)) == 2
    assert _losses(disk) == _losses(whole)
    last = next((tmp_path / "disk").rglob(f"weights-{RANKS - 1:05d}.safetensors"))
    assert last.stat().st_size > 4 * parameters // RANKS, "each rank writes its experts"
