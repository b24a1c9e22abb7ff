"""A real cluster, shared by all tests of this folder, and the demo on it."""

import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pytest
from pseudoreal_dev.cluster import cluster
from pseudoreal_dev.cluster.kubectl import Kubernetes

from tests.e2e.support import diagnosis


@dataclass(frozen=True)
class Demo:
    """Finished run of `make demo`, and its cluster."""

    output: str
    kubernetes: Kubernetes


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    running = item.funcargs.get("kubernetes")
    if report.failed and isinstance(running, Kubernetes):
        report.sections.append(("the cluster", diagnosis.state(running)))
    return report


@pytest.fixture(scope="session")
def kubernetes(pytestconfig: pytest.Config) -> Iterator[Kubernetes]:
    """The cluster of this machine, with both images; it goes down again unless it was up before."""
    was_up = not cluster.status().problem
    try:
        _run(pytestconfig, "prepare")
        running = cluster.up()
        yield Kubernetes.of_kubeconfig(running.kubeconfig, running.kubectl, running.helm)
    finally:
        if not was_up:
            cluster.down()


@pytest.fixture(scope="session")
def demo(pytestconfig: pytest.Config, kubernetes: Kubernetes) -> Demo:
    """The quickstart demo."""
    return Demo(_run(pytestconfig, "demo", "quickstart"), kubernetes)


@pytest.fixture(scope="session")
def llama(pytestconfig: pytest.Config, kubernetes: Kubernetes) -> Demo:
    return Demo(_run(pytestconfig, "demo", "llama"), kubernetes)


def _run(config: pytest.Config, *arguments: str) -> str:
    """Run `python -m pseudoreal_dev`, printing its output as it arrives; return the output."""
    lines, command = [], [sys.executable, "-m", "pseudoreal_dev", *arguments]
    with (
        _shown(config),
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
    ):
        assert process.stdout
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    output = "".join(lines)
    assert process.returncode == 0, output[-3000:]
    return output


def _shown(config: pytest.Config) -> AbstractContextManager[None]:
    """Return a context without output capture: printed text is shown immediately."""
    capture = config.pluginmanager.getplugin("capturemanager")
    assert capture
    shown: AbstractContextManager[None] = capture.global_and_fixture_disabled()
    return shown
