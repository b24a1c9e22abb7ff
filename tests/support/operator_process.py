"""The operator as a process of its own, that can be killed and started again."""

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
"""The grace period of its pod is 30 s."""

preload("pseudoreal_operator.__main__")


class Process(Protocol):
    """A program, or a process that was forked from a server that has imported it."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float, /) -> int: ...
    def kill(self) -> None: ...
    def send_signal(self, number: signal.Signals, /) -> None: ...


def _reserved() -> socket.socket:
    """A free port. While it is bound without a listener, no other test takes it, and the operator still can."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", free_port()))
    return reserved


@dataclass
class Operator:
    """Whatever it logs as an error fails the test, but for `expected`."""

    kubeconfig: Path
    namespace: str
    """Empty: it works for the whole cluster."""
    log: Path
    tls: Path | None = None
    """None: without an endpoint."""
    pod: str = ""
    """Empty: without a Lease."""
    is_program: bool = False
    """Whether it is started by its command line, which takes two seconds more."""
    address: socket.socket = field(default_factory=_reserved)
    report_address: socket.socket = field(default_factory=_reserved)
    metrics_address: socket.socket = field(default_factory=_reserved)
    process: Process | None = None
    expected: str | None = None
    program: Callable[[dict[str, str]], None] = field(default_factory=lambda: run)
    """What runs in the process, where it is no program of its own."""

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
        """Stops the operator as Kubernetes does: its exit code."""
        return self.end(signal.SIGTERM)

    def end(self, number: signal.Signals) -> int:
        assert self.process is not None, "it was started"
        self.process.send_signal(number)
        return self.process.wait(SHUTDOWN_SECONDS)

    def lines(self, event: str) -> list[Any]:
        """What it logged as `event`."""
        found = (json.loads(line) for line in self.said().splitlines() if line.startswith("{") and line.endswith("}"))
        return [line for line in found if line["event"] == event]

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def check(self, begin: int = 0) -> None:
        """Fails for unexpected errors in the log, from that character on."""
        lines = self.said()[begin:].splitlines()
        errors = [line for line in lines if "Traceback" in line or '"level": "error"' in line]
        assert not [line for line in errors if self.expected is None or self.expected not in line], "\n".join(errors)

    def health(self) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=5) as answer:
            return json.load(answer)

    def is_ready(self) -> bool:
        """Whether the chart's probes call it so, and its watches of one namespace run."""
        try:
            return bool(self.health()["watchers"] == 4)
        except OSError:
            return False

    def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Name and labels of each sample, as Prometheus' own client reads them."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
        return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


def run(environment: dict[str, str]) -> None:
    from pseudoreal_operator.__main__ import main

    os.environ.update(environment)
    main()
