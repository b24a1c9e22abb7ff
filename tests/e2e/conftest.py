"""A real cluster with the chart installed, shared by all tests of this folder."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from pseudoreal_dev import cluster
from pseudoreal_dev.kubectl import Kubernetes


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
