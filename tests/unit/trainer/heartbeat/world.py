"""Pods that train together on this machine and report to a server of the test."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.wire.reports import REPORT_URL, RankReport
from pseudoreal_trainer.heartbeat.record import HeartbeatRecord, read_heartbeat
from pseudoreal_trainer.pod.pod_folder import PodFolder

from tests.ports import free_port
from tests.unit.trainer.pod.faulty_worker import FAULTS
from tests.unit.trainer.pod.pod_program import AUTHORITY, TOKEN
from tests.unit.trainer.pod.server import Server


@dataclass
class World:
    """Pods of one rank each."""

    server: Server
    folder: Path
    pods: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def heartbeats(self) -> list[RankReport]:
        return sorted((s for r in list(self.server.newest.values()) for s in r.ranks), key=lambda s: s.rank)

    def wait_for(self, condition: Any) -> list[RankReport]:
        """The first heartbeats of all ranks for which the condition holds."""
        found: list[RankReport] = []

        def holds() -> bool:
            found[:] = self.heartbeats()
            assert all(pod.poll() is None for pod in self.pods), "a pod has ended"
            return len(found) == len(self.pods) and bool(condition(found))

        self.server.wait_for(holds)
        return found

    def makes_steps(self, count: int) -> None:
        begin = max((beat.step for beat in self.heartbeats()), default=0)
        self.wait_for(lambda beats: min(beat.step for beat in beats) >= begin + count)

    def record(self, rank: int) -> HeartbeatRecord:
        found = read_heartbeat(self.pod_folder(rank).heartbeat(0))
        assert found is not None
        return found

    def pod_folder(self, rank: int) -> PodFolder:
        return PodFolder(self.folder / f"pod-{rank}")

    def message(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / f"said-{rank}").read_text())
        return found

    @contextmanager
    def fault(self, kind: str, rank: int) -> Iterator[None]:
        file = self.folder / f"{kind}-{rank}"
        file.touch()
        try:
            yield
        finally:
            file.unlink(missing_ok=True)

    @contextmanager
    def stopped(self, rank: int) -> Iterator[None]:
        pid = self.record(rank).pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def start(self, config: PhaseConfig, environment: dict[str, str]) -> None:
        file = self.folder / "config.json"
        file.write_text(config.to_json())
        for rank in range(config.workers):
            self.pods.append(self._pod(file, rank, environment))

    def kill(self) -> None:
        """torchrun starts each rank in a session of its own."""
        # The supervisors first: otherwise they would see their ranks end.
        for pod in self.pods:
            with suppress(ProcessLookupError):
                os.killpg(pod.pid, signal.SIGKILL)
            pod.wait()
        # torchrun gives its workers sessions of their own, and they outlive it.
        for pid in _mentioning(str(self.folder)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _pod(self, config: Path, rank: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        endpoint = self.server.endpoint(f"pod-{rank}")
        own = {
            "PET_NODE_RANK": str(rank),
            "PSEUDOREAL_TERMINATION_LOG": str(self.folder / f"said-{rank}"),
            "PSEUDOREAL_OUTCOME_DIRECTORY": str(self.pod_folder(rank).path),
            FAULTS: str(self.folder),
            REPORT_URL: endpoint.url,
            TOKEN: str(endpoint.token),
            AUTHORITY: str(endpoint.authority),
        }
        command = [sys.executable, "-m", "tests.unit.trainer.pod.pod_program", str(config)]
        with (self.folder / f"log-{rank}").open("w") as log:
            return subprocess.Popen(command, env=environment | own, stdout=log, stderr=log, start_new_session=True)


def _mentioning(text: str) -> Iterator[int]:
    """Processes whose command line has that text."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if text in file.read_bytes().decode(errors="replace"):
                yield int(file.parent.name)


@contextmanager
def world(config: PhaseConfig, server: Server, folder: Path) -> Iterator[World]:
    """Trains until its context ends, or the phase."""
    port = str(free_port())
    found = World(server, folder)
    environment = dict(os.environ) | {
        "PET_NNODES": str(config.workers),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[4]), os.environ.get("PYTHONPATH", "")]),
    }
    try:
        found.start(config, environment)
        yield found
    finally:
        found.kill()
