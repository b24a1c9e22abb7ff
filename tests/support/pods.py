"""The pod program as a local process."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pseudoreal_api.names import RENDEZVOUS_SECRET
from pseudoreal_api.resolved.config import DelinkConfig, PhaseConfig

from tests.support.processes import LIMIT_SECONDS

SECRET = Path(__file__).parents[1] / "data" / "rendezvous-secret"
"""Rendezvous secret of jobs with local processes as pods."""
PROGRAM = ("-m", "pseudoreal_trainer.cli.pod")
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Pod:
    process: "subprocess.Popen[bytes]"
    folder: Path

    def wait(self, seconds: float = LIMIT_SECONDS) -> int:
        """Return the exit code. Kills the pod and raises TimeoutError, with its log, if it does not end."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise TimeoutError(f"after {seconds:.0f} s the pod has not ended:\n{self.said()}") from None

    def said(self) -> str:
        """Return the pod's log."""
        return (self.folder / "log").read_text()

    def message(self) -> dict[str, Any]:
        """Return the pod's termination message."""
        found: dict[str, Any] = json.loads((self.folder / "termination").read_text())
        return found


def start_pod(
    config: PhaseConfig | DelinkConfig,
    folder: Path,
    number: int = 0,
    workers: int = 1,
    *,
    program: tuple[str, ...] = PROGRAM,
    environment: Mapping[str, str] | None = None,
    before: Callable[[], object] | None = None,
) -> Pod:
    """Start worker `number` of `workers`; several need a rendezvous in `environment` (see `meeting`).

    The pod writes its log and its termination message into the folder. The folder is created. `before` is called in the
    child process, before the program.
    """
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config.to_json())
    own = {
        "PET_NNODES": str(workers),
        "PET_NODE_RANK": str(number),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PSEUDOREAL_TERMINATION_LOG": str(folder / "termination"),
        "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *program, str(folder / "config.json")],
            env=dict(os.environ) | own | dict(environment or {}),
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=before,
        )
    return Pod(process, folder)


def meeting(number: int, port: int) -> dict[str, str]:
    """Return the environment variables of the rendezvous of pods on a cluster, for worker `number`."""
    return {
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
        "PET_RDZV_ID": "job-phase-1",
        RENDEZVOUS_SECRET: str(SECRET),
        "PSEUDOREAL_NODE_NAME": f"node-{number}",
    }
