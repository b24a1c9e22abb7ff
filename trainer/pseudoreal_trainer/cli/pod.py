"""The main process of a trainer or delink pod: `python -m pseudoreal_trainer.cli.pod CONFIG.json`.

It starts torchrun, whose own exit code says nothing, and tells Kubernetes how the phase ended: in the termination
message and by the exit codes of the contract. It imports no torch, so that it starts at once.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import structlog
from pseudoreal_api.resolved.config import DelinkConfig, PhaseConfig, read_config
from pseudoreal_api.wire.contract import ContractError
from pseudoreal_api.wire.messages import TerminationMessage

from pseudoreal_trainer.checkpoint.delink import delink
from pseudoreal_trainer.checkpoint.store import store_of
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.gpu_environment import gpu_environment
from pseudoreal_trainer.logs import configure_logs
from pseudoreal_trainer.pod.crash import read_crashes
from pseudoreal_trainer.pod.endpoint import endpoint_of_pod
from pseudoreal_trainer.pod.memory_use import exhausted, pod_memory
from pseudoreal_trainer.pod.metrics_server import metrics_port, serving_metrics
from pseudoreal_trainer.pod.outcome import (
    OUTCOME_DIRECTORY,
    collect_outcomes,
    ended_badly,
    pod_outcome,
    write_termination,
)
from pseudoreal_trainer.pod.partners import Partners
from pseudoreal_trainer.pod.pod_folder import PodFolder, memory_directory
from pseudoreal_trainer.pod.reporting import reporting
from pseudoreal_trainer.threads import threads_of

WORKER = "pseudoreal_trainer.cli.rank"
_JOIN_SECONDS = 7 * 24 * 3600
"""Seconds that torchrun waits for the other pods. What bounds that for pods that wait for a node is spec.deadlines, and
spec.hang.startSeconds for pods that run and do not meet."""
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_SHUTDOWN_SECONDS = 3600
"""Seconds after a SIGTERM at which torchrun kills its ranks (30 s by itself): time for the step under way and for a
save. In a pod the operator sets less than the kubelet would wait."""
_CONNECT_SECONDS, _AGAIN_SECONDS, _LOG_SECONDS = 5.0, 1.0, 60.0
_LOOK_SECONDS = 0.5
"""Seconds between two looks at the ranks."""

log = structlog.get_logger()


def main() -> None:
    stop = _Stop()
    configure_logs()
    path = Path(sys.argv[1])
    message = _run(path, stop)
    write_termination(message)
    if message.message:
        log.info("ended", outcome=message.outcome, message=message.message)
    sys.exit(message.exit_code)


def _run(path: Path, stop: "_Stop") -> TerminationMessage:
    try:
        config = read_config(path)
    except ContractError as error:
        return _refused(path, error)
    return _train(config, path, stop) if isinstance(config, PhaseConfig) else _delink(config)


def _refused(path: Path, error: ContractError) -> TerminationMessage:
    """The message of a pod that cannot read its configuration. The phase and the execution are written alike in every
    release."""
    config = json.loads(path.read_bytes())
    return TerminationMessage(
        outcome="InvalidJob",
        phase=config.get("phase", ""),
        execution=config.get("execution", 0),
        message=str(error)[:2000],
    )


def _delink(config: DelinkConfig) -> TerminationMessage:
    try:
        return delink(config)
    except Exception as error:
        log.exception("delink_failed", phase=config.phase)
        return ended_badly("Failed", config, f"{type(error).__name__}: {error}")


def _train(config: PhaseConfig, path: Path, stop: "_Stop") -> TerminationMessage:
    with _folder() as folder:
        before, partners = pod_memory(), Partners(PodFolder(folder))
        with (
            reporting(PodFolder(folder), endpoint_of_pod()),
            serving_metrics(PodFolder(folder), metrics_port(os.environ)),
        ):
            environment = _environment(config, folder)
            await_rendezvous(environment, lambda: stop.asked)
            exit_code = _run_torchrun(path, environment, stop, partners)
        lacked = exhausted(before, pod_memory())
        crashes = read_crashes(folder, config.processes_per_worker)
        message = pod_outcome(collect_outcomes(folder), config, exit_code, stop.asked, lacked, partners.ended, crashes)
    return message if message.checkpoint else _with_newest_checkpoint(message, config)


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder in which the ranks leave their outcomes."""
    if named := os.environ.get(OUTCOME_DIRECTORY):
        Path(named).mkdir(parents=True, exist_ok=True)
        yield Path(named)
        return
    # Errors: the thread that reports may look into it until the end.
    with tempfile.TemporaryDirectory("-pseudoreal", dir=memory_directory(), ignore_cleanup_errors=True) as temporary:
        yield Path(temporary)


def _with_newest_checkpoint(message: TerminationMessage, config: PhaseConfig) -> TerminationMessage:
    """The message of a pod whose ranks could not say where the training stands, completed from the newest
    checkpoint."""
    store = store_of(config)
    try:
        newest = store.committed(config.phase)[-1:]
    except TrainingError:
        return message
    for manifest in newest:
        where = {"step": manifest.step, "tokens": manifest.tokens}
        return message.model_copy(
            update=where | {"loss": manifest.loss, "checkpoint": manifest.name, "digest": store.digest(manifest)}
        )
    return message


def _environment(config: PhaseConfig, outcomes: Path) -> dict[str, str]:
    """The environment of torchrun: the pod's own, and defaults for what that leaves open; PET_* reaches torchrun as it
    is."""
    processes = config.processes_per_worker
    defaults = {
        "PET_NPROC_PER_NODE": str(processes),
        "OMP_NUM_THREADS": str(threads_of(processes)),
        # Threads that spin while they wait steal the time of the other ranks on the machine.
        "OMP_WAIT_POLICY": "passive",
        SHUTDOWN_TIMEOUT: str(_SHUTDOWN_SECONDS),
    }
    return (
        defaults
        | gpu_environment(config)
        | dict(os.environ)
        | rendezvous_host(os.environ)
        | {OUTCOME_DIRECTORY: str(outcomes)}
    )


def rendezvous_host(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that say whether this pod holds the rendezvous, as worker 0 does. torchrun would compare names of hosts
    to find that out, and in its node's network a pod has the name of the node."""
    if environment.get("PET_RDZV_BACKEND") != "c10d":
        return {}
    is_host = "true" if environment.get("PET_NODE_RANK") == "0" else "false"
    return {"PET_RDZV_CONF": f"is_host={is_host},join_timeout={_JOIN_SECONDS}"}


def await_rendezvous(environment: Mapping[str, str], is_asked_to_stop: Callable[[], bool]) -> None:
    """Waits until worker 0 answers, or the pod is asked to stop. It may wait for a node for hours, and torchrun gives
    up after a minute."""
    if environment.get("PET_RDZV_BACKEND") != "c10d" or environment.get("PET_NODE_RANK") == "0":
        return
    host, _, port = environment["PET_RDZV_ENDPOINT"].rpartition(":")
    told = time.monotonic()
    while not is_asked_to_stop():
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() - told >= _LOG_SECONDS:
                told = time.monotonic()
                log.warning("waits_for_worker_0", endpoint=f"{host}:{port}", error=str(error))
            time.sleep(_AGAIN_SECONDS)


def _run_torchrun(config: Path, environment: dict[str, str], stop: "_Stop", partners: Partners) -> int:
    """Runs torchrun: its exit code. torchrun gives ranks half a minute to end when one of them is gone; `partners` does
    not."""
    command = [sys.executable, "-m", "pseudoreal_trainer.rendezvous", "--max-restarts", "0"]
    command += ["--module", WORKER, str(config)]
    process = subprocess.Popen(command, env=environment)
    stop.pass_on_to(process)
    while True:
        try:
            return process.wait(_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            partners.look()


class _Stop:
    """Remembers a SIGTERM, whenever it comes, and passes it on to torchrun. A delink is short and simply ends."""

    def __init__(self) -> None:
        self.asked = False
        self._process: subprocess.Popen[bytes] | None = None
        signal.signal(signal.SIGTERM, self._hear)

    def pass_on_to(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        if self.asked:
            process.terminate()

    def _hear(self, *_: object) -> None:
        self.asked = True
        if self._process is not None:
            self._process.terminate()


if __name__ == "__main__":
    main()
