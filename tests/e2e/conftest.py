"""A real cluster, shared by all tests of this folder, and the demo on it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
from pseudoreal_dev.cluster import cluster
from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.machine import paths, shell

from tests.e2e.support import diagnosis


@dataclass(frozen=True)
class Preparation:
    """Background process for bringing up the cluster. `was_up`: the cluster was running before these tests."""

    process: subprocess.Popen[bytes]
    log: Path
    was_up: bool

    def wait(self) -> None:
        """Print the process's log until it ends."""
        with self.log.open() as lines:
            while self.process.poll() is None:
                for line in lines:
                    print(line, end="", flush=True)
                time.sleep(1)


PREPARATION = pytest.StashKey[Preparation]()


@dataclass(frozen=True)
class Demo:
    """Finished run of `make demo`, and its cluster."""

    output: str
    kubernetes: Kubernetes


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start building images and the cluster in the background of earlier tests: waiting for network and disk can take
    ten minutes on a new machine."""
    if session.config.option.collectonly or not any(item.get_closest_marker("e2e") for item in session.items):
        return
    was_up = not cluster.status().problem
    command = [sys.executable, "-m", "pseudoreal_dev", "prepare"]
    log = paths.logs() / "prepare.log"
    log.unlink(missing_ok=True)
    with shell.open_log(log) as out:
        # In a session of its own, so that what it started can be ended with it.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    session.config.stash[PREPARATION] = Preparation(process, log, was_up)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    running = item.funcargs.get("kubernetes")
    if report.failed and isinstance(running, Kubernetes):
        report.sections.append(("the cluster", diagnosis.state(running)))
    return report


def pytest_unconfigure(config: pytest.Config) -> None:
    preparation = config.stash.get(PREPARATION, None)
    if preparation is None:
        return
    if preparation.process.poll() is None:
        os.killpg(preparation.process.pid, signal.SIGTERM)
        preparation.process.wait()
    if not preparation.was_up:
        cluster.down()


@pytest.fixture(scope="session")
def kubernetes(pytestconfig: pytest.Config) -> Kubernetes:
    """The cluster of this machine, with both images."""
    preparation = pytestconfig.stash[PREPARATION]
    with _shown(pytestconfig):
        preparation.wait()
    assert preparation.process.returncode == 0, preparation.log.read_text()[-3000:]
    running = cluster.up()
    return Kubernetes.of_kubeconfig(running.kubeconfig, running.kubectl, running.helm)


@pytest.fixture(scope="session")
def demo(pytestconfig: pytest.Config, kubernetes: Kubernetes) -> Demo:
    """The quickstart demo."""
    return _run(pytestconfig, kubernetes, "quickstart")


@pytest.fixture(scope="session")
def llama(pytestconfig: pytest.Config, kubernetes: Kubernetes) -> Demo:
    return _run(pytestconfig, kubernetes, "llama")


def _run(config: pytest.Config, kubernetes: Kubernetes, name: str) -> Demo:
    """Run the demo's program, printing its output as it arrives."""
    lines, command = [], [sys.executable, "-m", "pseudoreal_dev", "demo", name]
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
    return Demo(output, kubernetes)


def _shown(config: pytest.Config) -> AbstractContextManager[None]:
    """Return a context without output capture: printed text is shown immediately."""
    capture = config.pluginmanager.getplugin("capturemanager")
    assert capture
    shown: AbstractContextManager[None] = capture.global_and_fixture_disabled()
    return shown
