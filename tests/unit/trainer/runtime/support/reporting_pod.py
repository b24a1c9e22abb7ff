"""A pod that reports to a server in the test's process."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.wire.reports import METRICS_PORT, REPORT_URL
from pseudoreal_trainer.runtime.heartbeat import HeartbeatRecord, read_heartbeat
from pseudoreal_trainer.runtime.pod_folder import PodFolder

from tests.support.pods import Pod, start_pod
from tests.unit.trainer.runtime.support.faulty_worker import FAULTS
from tests.unit.trainer.runtime.support.pod_program import AUTHORITY, TOKEN
from tests.unit.trainer.runtime.support.server import Server

NAME = "pod-0"
"""Token by which the server knows the pod."""


@contextmanager
def reporting_pod(config: PhaseConfig, server: Server, folder: Path, metrics_port: int = 0) -> Iterator[Pod]:
    """Train until the context ends, or the phase. The pod serves metrics at `metrics_port`; 0 means any free port."""
    endpoint, place = server.endpoint(NAME), folder / "pod"
    environment = {
        "PSEUDOREAL_OUTCOME_DIRECTORY": str(_folder(place).path),
        FAULTS: str(folder),
        REPORT_URL: endpoint.url,
        METRICS_PORT: str(metrics_port),
        TOKEN: str(endpoint.token),
        AUTHORITY: str(endpoint.authority),
    }
    pod = start_pod(
        config, place, program=("-m", "tests.unit.trainer.runtime.support.pod_program"), environment=environment
    )
    try:
        yield pod
    finally:
        # Kill the pod's process before its ranks: otherwise the pod would see and report their end.
        with suppress(ProcessLookupError):
            os.killpg(pod.process.pid, signal.SIGKILL)
        pod.process.wait()
        # torchrun starts its workers in sessions of their own, so they survive the signal to the process group.
        for record in heartbeats_of(pod):
            with suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGKILL)


def heartbeats_of(pod: Pod) -> list[HeartbeatRecord]:
    """Return the heartbeats of the ranks that have started."""
    return [record for record in map(read_heartbeat, _folder(pod.folder).heartbeats()) if record]


def _folder(place: Path) -> PodFolder:
    return PodFolder(place / "outcomes")
