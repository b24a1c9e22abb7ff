"""A real cluster with the chart installed, shared by all tests of this folder."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from pseudoreal_api.status import PseudoRealJobStatus
from pseudoreal_dev import cluster
from pseudoreal_dev.follow import read_status
from pseudoreal_dev.kubectl import Kubernetes

from tests.jobs import good_job

T = TypeVar("T")
NAMESPACE = "default"


@dataclass(frozen=True)
class Demo:
    """A finished run of `make demo` and the cluster that it left."""

    output: str
    kubernetes: Kubernetes


@pytest.fixture(scope="session")
def demo(pytestconfig: pytest.Config) -> Iterator[Demo]:
    """Runs the demo's program, showing its output as it comes, and takes the cluster down at the end."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    assert capture
    was_up = not cluster.status().problem
    lines = []
    with (
        capture.global_and_fixture_disabled(),
        subprocess.Popen(
            [sys.executable, "-m", "pseudoreal_dev", "demo"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        assert process.stdout
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    output = "".join(lines)
    assert process.returncode == 0, output[-3000:]
    running = cluster.up()
    yield Demo(output, Kubernetes.of_kubeconfig(running.kubeconfig, running.kubectl, running.helm))
    if not was_up:
        cluster.down()


@pytest.fixture(scope="session")
def kubernetes(demo: Demo) -> Kubernetes:
    return demo.kubernetes


@dataclass(frozen=True)
class Job:
    """A job on the cluster."""

    kubernetes: Kubernetes
    name: str

    def status(self) -> PseudoRealJobStatus:
        return read_status(self.kubernetes.find("prj", self.name, f"--namespace={NAMESPACE}"))

    def pods(self) -> list[dict[str, Any]]:
        return self.kubernetes.items(
            "pods", f"--namespace={NAMESPACE}", f"--selector=pseudoreal.dev/job-name={self.name}"
        )

    def wait(self, what: str, condition: Callable[[PseudoRealJobStatus], bool], seconds: float) -> PseudoRealJobStatus:
        def reached() -> PseudoRealJobStatus | None:
            status = self.status()
            return status if condition(status) else None

        return wait_for(what, reached, seconds, self.status)


def wait_for(what: str, probe: Callable[[], T | None], seconds: float, explain: Callable[[], object] = str) -> T:
    """Polls until `probe` gives something true; fails with what `explain` says."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := probe():
            return found
        time.sleep(0.5)
    pytest.fail(f"{what} did not happen within {seconds:.0f} s: {explain()}")


@pytest.fixture
def start(kubernetes: Kubernetes) -> Iterator[Callable[..., Job]]:
    """Applies a small job on the quickstart's text and volume; it is deleted afterwards."""
    started: list[Job] = []

    def apply(name: str, **changes: Any) -> Job:
        changes = {"spec__data__path": "corpus/kjv", "spec__checkpoint__volume__claimName": "quickstart", **changes}
        job = Job(kubernetes, name)
        started.append(job)
        kubernetes.apply(good_job(name, **changes))
        return job

    yield apply
    for job in started:
        kubernetes.run("delete", "prj", job.name, f"--namespace={NAMESPACE}", "--ignore-not-found", "--timeout=60s")
