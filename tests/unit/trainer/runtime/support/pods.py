"""Pods as real processes with a rendezvous on loopback; tests kill their ranks or whole pods."""

import json
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle, product
from pathlib import Path
from typing import Any

from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.wire.reports import REPORT_URL
from pseudoreal_trainer.runtime.heartbeat import HeartbeatRecord, read_heartbeat
from pseudoreal_trainer.runtime.pod_folder import PodFolder

from tests.support.patience import wait_for
from tests.support.pods import Pod, meeting, start_pod
from tests.support.ports import free_ports
from tests.unit.trainer.runtime.support.faulty_worker import FAULTS
from tests.unit.trainer.runtime.support.pod_program import AUTHORITY, TOKEN
from tests.unit.trainer.runtime.support.server import Server

STEPS = 300
_STORE_REQUEST = struct.pack("<BIBQ3sQ1s", 13, 0x3C85F7CE, 0, 3, b"key", 1, b"1")
"""Request of torch's TCPStore client: the handshake, and setting a key."""
KILLED_AT = 12


@contextmanager
def stranger_at(ports: Sequence[int]) -> Iterator[None]:
    """Within the context, a stranger keeps sending the ports requests of torch's TCPStore and random bytes."""
    over = threading.Event()

    def disturb() -> None:
        for port, said in cycle(product(ports, (_STORE_REQUEST, os.urandom(100)))):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as connected:
                connected.sendall(said)
            if over.wait(0.02):
                return

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def training(
    config: PhaseConfig, folder: Path, server: Server | None = None, ports: Sequence[int] = (), **more: Any
) -> Iterator[list[Pod]]:
    """Yield the pods of workers 0 and 1, and the spare pods; their rendezvous uses four ports. The pods and their ranks
    end with the context."""
    folder.mkdir(exist_ok=True)
    (port, *_) = ports or free_ports(4)
    pods = []
    for number in range(2 + config.spares):
        place = folder / str(number)
        environment = meeting(number, port) | {"PSEUDOREAL_OUTCOME_DIRECTORY": str(place / "outcomes")}
        environment |= _reporting(server, number, folder) if server else {}
        pods.append(start_pod(config, place, number, 2, environment=environment, **more))
    try:
        yield pods
    finally:
        for pod in pods:
            with suppress(ProcessLookupError):
                os.killpg(pod.process.pid, signal.SIGKILL)
            pod.process.wait()
        for record in (record for pod in pods for record in ranks(pod)):
            with suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGKILL)


def _reporting(server: Server, number: int, folder: Path) -> dict[str, str]:
    endpoint = server.endpoint(f"pod-{number}")
    return {
        REPORT_URL: endpoint.url,
        TOKEN: str(endpoint.token),
        AUTHORITY: str(endpoint.authority),
        FAULTS: str(folder),
    }


def ranks(pod: Pod) -> list[HeartbeatRecord]:
    return [found for found in map(read_heartbeat, PodFolder(pod.folder / "outcomes").heartbeats()) if found]


def rank_that_trains(pod: Pod, step: int = KILLED_AT, but: int = 0) -> int:
    """Return the process id of the pod's rank once the rank is at the step. A process `but` is ignored."""

    def there() -> int:
        assert pod.process.poll() is None, pod.said()
        return next((record.pid for record in ranks(pod) if record.step >= step and record.pid != but), 0)

    return wait_for(f"step {step}", there, pod.said, pause=0.005)


def end_at_once(pod: Pod) -> None:
    """Kill everything in the pod, as if its node lost power: the program, torchrun and the ranks."""
    found = ranks(pod)
    os.killpg(pod.process.pid, signal.SIGKILL)
    for record in found:
        with suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGKILL)


def last_files(config: PhaseConfig) -> dict[str, str]:
    """Return the SHA-256 of the files of the phase's last checkpoint: weights and moments of every rank."""
    folder = Path(config.work_directory) / "checkpoints" / f"pseudo-{STEPS:08d}"
    manifest = json.loads((folder / "manifest.json").read_text())
    return {name: file["sha256"] for name, file in manifest["files"].items()}
