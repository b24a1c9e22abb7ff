"""Runs a job's phases and delinks one after the other as local processes, with the same programs as the pods."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pseudoreal_api.resolved.config import DelinkConfig, PhaseConfig
from pseudoreal_api.resolved.resolve import delink_config
from pseudoreal_api.spec.checkpoint import Storage
from pseudoreal_api.spec.network import Preflight
from pseudoreal_api.wire.messages import TerminationMessage

from pseudoreal_trainer.accelerator.environment import TAKE_FOUND
from pseudoreal_trainer.cli.run_directory import RunDirectory
from pseudoreal_trainer.portable import loopback_interface
from pseudoreal_trainer.runtime.termination import TERMINATION_LOG

Event = dict[str, Any]
OnEvent = Callable[[Event], None]


class PodFailed(RuntimeError):
    """A phase or delink did not succeed."""

    def __init__(self, message: TerminationMessage) -> None:
        super().__init__(message.message)
        self.message = message


@dataclass(frozen=True)
class LocalRun:
    directory: RunDirectory
    on_event: OnEvent
    trace: Path | None = None
    """Folder for the traces of all ranks; None: no traces."""

    def run(self) -> None:
        """Run all unfinished phases.

        Raises PodFailed, also after SIGINT or SIGTERM: the running phase then saves a checkpoint and yields.
        """
        for index in range(len(self.directory.job.spec.phases)):
            if self.directory.final_checkpoint(index) is None:
                if index > 0:
                    self._run_pod(self._delink_config(index))
                self._run_pod(self._phase_config(index))

    def _phase_config(self, index: int) -> PhaseConfig:
        trace = None if self.trace is None else str(self.trace.resolve())
        # A single machine has no links to check; the command announces that spec.network and resources are ignored.
        changes = {"trace_directory": trace, "preflight": Preflight(), "gpus": 0}
        return self.directory.phase_config(index).model_copy(update=changes)

    def _delink_config(self, index: int) -> DelinkConfig:
        directory = self.directory
        work = str(directory.path.resolve())
        return delink_config(directory.job, index, execution=directory.execution, work_directory=work)

    def _run_pod(self, config: PhaseConfig | DelinkConfig) -> None:
        files = self.directory.path / "pods"
        files.mkdir(exist_ok=True)
        stem = files / f"{config.phase}-{config.stage}"
        config_file, termination = stem.with_suffix(".json"), stem.with_suffix(".termination.json")
        if isinstance(config, PhaseConfig):
            # All ranks are processes of one pod.
            config = config.model_copy(update={"workers": 1, "processes_per_worker": config.ranks})
        config_file.write_text(config.to_json(indent=2), encoding="utf-8")
        termination.unlink(missing_ok=True)
        exit_code, stopped = self._run_process(config_file, termination, stem.with_suffix(".log"))
        message = _read_termination(termination, config, exit_code)
        if stopped and message.outcome != "InvalidJob" and exit_code <= 0:
            # The pod ended by itself at that moment, or had not installed its handler yet: report the requested stop.
            message = message.model_copy(update={"outcome": "Yielded", "message": "asked to stop"})
        if message.outcome != "Succeeded":
            raise PodFailed(message)

    def _run_process(self, config: Path, termination: Path, errors: Path) -> tuple[int, bool]:
        """Run a pod's process; return its exit code, and whether it was asked to stop."""
        command = [sys.executable, "-m", "pseudoreal_trainer.cli.pod", str(config)]
        # Signals first: a KeyboardInterrupt right after the start of the pod would leave the pod running.
        with errors.open("w", encoding="utf-8") as log_file, _stop_requests() as requests:
            # A new session: Ctrl-C reaches only this process. This process then asks the pod to save and stop.
            pod = subprocess.Popen(
                command,
                env=_environment(termination),
                stdout=subprocess.PIPE,
                stderr=log_file,
                encoding="utf-8",
                errors="replace",  # libraries may print any bytes
                start_new_session=True,
            )
            requests.pass_on_to(pod)
            assert pod.stdout is not None, "stdout is a pipe"
            try:
                for line in pod.stdout:
                    self._handle_line(line, log_file.write)
            except BaseException:  # SystemExit too, by which rich answers a closed stdout
                # Without a reader the pod would train on, in a session that Ctrl-C does not reach.
                pod.terminate()
                # A full pipe would block the pod before it has saved.
                for _ in pod.stdout:
                    pass
                pod.wait()
                raise
            return pod.wait(), requests.received

    def _handle_line(self, line: str, keep: Callable[[str], object]) -> None:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict):
            self.on_event(event)
        else:
            keep(line)


class _StopRequests:
    """Handler of SIGINT and SIGTERM that passes each on to the pod as SIGTERM."""

    def __init__(self) -> None:
        self.received = False
        self._pod: subprocess.Popen[str] | None = None

    def pass_on_to(self, pod: subprocess.Popen[str]) -> None:
        self._pod = pod
        # A signal before this call found no pod to pass the signal on to.
        if self.received:
            pod.terminate()

    def hear(self, *_: object) -> None:
        self.received = True
        if self._pod is not None:
            self._pod.terminate()


@contextmanager
def _stop_requests() -> Iterator[_StopRequests]:
    """Inside the context, `_StopRequests` handles SIGINT and SIGTERM of this process."""
    requests, handled = _StopRequests(), (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, requests.hear) for number in handled]
    try:
        yield requests
    finally:
        for number, handler in zip(handled, before, strict=True):
            signal.signal(number, handler)


def set_endpoint(storage: Storage) -> None:
    """Point this process and its pods to the spec's object storage service: boto reads the address of the service from
    the environment."""
    if storage.object_storage is not None and storage.object_storage.endpoint is not None:
        os.environ["AWS_ENDPOINT_URL"] = storage.object_storage.endpoint


def _environment(termination: Path) -> dict[str, str]:
    # The machine is the user's own: its accelerators belong to nobody else.
    own = {"PET_NNODES": "1", TERMINATION_LOG: str(termination.resolve()), TAKE_FOUND: "1"}
    return {"GLOO_SOCKET_IFNAME": loopback_interface()} | dict(os.environ) | own


def _read_termination(termination: Path, config: PhaseConfig | DelinkConfig, exit_code: int) -> TerminationMessage:
    if termination.exists():
        return TerminationMessage.model_validate_json(termination.read_bytes())
    return TerminationMessage(
        outcome="Failed",
        phase=config.phase,
        execution=config.execution,
        message=f"the pod's process ended with exit code {exit_code} and without a message",
    )
