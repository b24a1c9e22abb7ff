"""A job from its file to its end, with `pseudoreal` alone: real nodes, real kubelets, the real operator."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from pseudoreal_dev.cluster.kubectl import Kubernetes

from tests.e2e.faults.support.undisturbed import SPEC, Undisturbed
from tests.e2e.support.job import CLAIM, IN_NAMESPACE, PATIENCE_SECONDS, Job
from tests.support.jobs import good_job

pytestmark = pytest.mark.e2e

NAME = "by-hand"


@dataclass(frozen=True)
class Terminal:
    kubeconfig: str

    def says(self, *words: str) -> str:
        """Return the output of the command. The command must succeed."""
        program = Path(sys.executable).with_name("pseudoreal")
        where = [] if words[0] == "validate" else [self.kubeconfig, IN_NAMESPACE]
        done = subprocess.run([program, *words, *where], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def file(tmp_path: Path, kubernetes: Kubernetes) -> Iterator[Path]:
    volume = {"spec__data__path": "corpus/kjv", "spec__checkpoint__storage__volume__claimName": CLAIM}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(good_job(NAME, **volume | SPEC)))
    yield path
    kubernetes.run("delete", "prj", NAME, IN_NAMESPACE, "--ignore-not-found", "--timeout=10m")


@pytest.mark.long
def test_a_job_by_the_command_alone(kubernetes: Kubernetes, undisturbed: Undisturbed, file: Path) -> None:
    terminal, job = Terminal(kubernetes.kubectl[1]), Job(kubernetes, NAME)
    terminal.says("validate", str(file))
    assert NAME in terminal.says("submit", str(file))
    (pod,) = job.wait_for_steps("pseudo", 20)
    assert all(word in terminal.says("get") for word in (NAME, "Training", "pseudo"))
    described = terminal.says("describe", NAME)
    assert pod["metadata"]["name"] in described
    assert pod["spec"]["nodeName"] in described
    assert "phase_started" in terminal.says("logs", NAME, "--rank", "0")
    assert f"fits: {pod['spec']['nodeName']} 2" in terminal.says("plan", NAME)
    terminal.says("suspend", NAME)
    job.wait("the suspension", lambda status: status.state == "Suspended")
    assert "Suspended" in terminal.says("get", NAME)
    terminal.says("resume", NAME)
    shown = terminal.says("watch", NAME)
    assert "Complete" in shown
    assert job.wait_for_end().state == "Complete"
    assert job.final_files() == undisturbed.files, "the weights of a job that nobody touched"
