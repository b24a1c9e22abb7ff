"""The operator as a separate process, for tests to kill and restart."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from prometheus_client.parser import text_string_to_metric_families
from pseudoreal_api.wire.reports import REPORT_PATH

from tests.support.chart import RELEASE
from tests.support.ports import free_port
from tests.support.processes import Forked, preload

SHUTDOWN_SECONDS = 25.0
"""Limit for a shutdown; the grace period of the operator's pod is 30 s."""

preload("pseudoreal_operator.__main__")


class Process(Protocol):
    """Common interface of `subprocess.Popen` and `Forked`."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float, /) -> int: ...
    def kill(self) -> None: ...
    def send_signal(self, number: signal.Signals, /) -> None: ...


def _reserved() -> socket.socket:
    """Return a socket bound to a free port. Bound without a listener, it keeps the port from other tests, but the
    operator can still listen on it."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", free_port()))
    return reserved


@dataclass
class Operator:
    """An operator process. Any error in its log fails the test, except errors containing `expected`."""

    kubeconfig: Path
    namespace: str
    """Namespace watched by the operator; empty: the whole cluster."""
    log: Path
    tls: Path | None = None
    """Folder with the TLS files of the report endpoint; None: no endpoint."""
    pod: str = ""
    """Pod name for the Lease; empty: no Lease."""
    is_program: bool = False
    """Whether to start a new Python with the operator's command line; this takes two seconds longer than a fork."""
    address: socket.socket = field(default_factory=_reserved)
    report_address: socket.socket = field(default_factory=_reserved)
    metrics_address: socket.socket = field(default_factory=_reserved)
    process: Process | None = None
    expected: str | None = None
    program: Callable[[dict[str, str]], None] = field(default_factory=lambda: run)
    """Function run by the forked process, unless `is_program`."""

    @property
    def port(self) -> int:
        port: int = self.address.getsockname()[1]
        return port

    @property
    def metrics_port(self) -> int:
        port: int = self.metrics_address.getsockname()[1]
        return port

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        environment = os.environ | self._settings()
        if not self.is_program:
            self.process = Forked(self.program, environment, log=self.log)
            return
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "pseudoreal_operator"]
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def _settings(self) -> dict[str, str]:
        settings = {
            "KUBECONFIG": str(self.kubeconfig),
            "PSEUDOREAL_TRAINER_IMAGE": "registry.example/trainer:test",
            "PSEUDOREAL_NAMESPACES": self.namespace,
            "PSEUDOREAL_HEALTH_PORT": str(self.port),
            "PSEUDOREAL_METRICS_PORT": str(self.metrics_port),
        }
        if self.tls:
            report_port = self.report_address.getsockname()[1]
            settings |= {
                "PSEUDOREAL_TLS_DIRECTORY": str(self.tls),
                "PSEUDOREAL_REPORT_PORT": str(report_port),
                "PSEUDOREAL_REPORT_URL": f"https://127.0.0.1:{report_port}{REPORT_PATH}",
                "PSEUDOREAL_REPORT_CA": str(self.tls / "ca.crt"),
            }
        if self.pod:
            settings |= {"PSEUDOREAL_LEASE": f"{self.namespace}/{RELEASE}", "PSEUDOREAL_POD_NAME": self.pod}
        return settings

    def kill(self) -> None:
        self.end(signal.SIGKILL)

    def stop(self) -> int:
        """Stop the operator with SIGTERM, as Kubernetes does; return its exit code."""
        return self.end(signal.SIGTERM)

    def end(self, number: signal.Signals) -> int:
        assert self.process is not None, "the operator was started"
        self.process.send_signal(number)
        return self.process.wait(SHUTDOWN_SECONDS)

    def lines(self, event: str) -> list[Any]:
        """Return the logged events with this name."""
        found = (json.loads(line) for line in self.said().splitlines() if line.startswith("{") and line.endswith("}"))
        return [line for line in found if line["event"] == event]

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def check(self, begin: int = 0) -> None:
        """Fail for unexpected errors in the log, starting at the character `begin`."""
        lines = self.said()[begin:].splitlines()
        errors = [line for line in lines if "Traceback" in line or '"level": "error"' in line]
        assert not [line for line in errors if self.expected is None or self.expected not in line], "\n".join(errors)

    def health(self) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=5) as answer:
            return json.load(answer)

    def is_ready(self) -> bool:
        """Return whether the operator is healthy by the chart's probes, with the watches of one namespace running."""
        try:
            return bool(self.health()["watchers"] == 4)
        except OSError:
            return False

    def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Return the value of each metric sample by name and labels, parsed by Prometheus' own client."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
        return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


def run(environment: dict[str, str]) -> None:
    from pseudoreal_operator.__main__ import main

    os.environ.update(environment)
    main()
