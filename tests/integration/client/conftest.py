"""The command as a user runs it, and jobs with status and pods written by the test: no operator runs."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from kubernetes import client
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_dev.cluster.control_plane import ControlPlane
from pseudoreal_operator.manifests.objects import children
from pseudoreal_operator.observe.stages import Stage, StageKind
from pseudoreal_operator.settings import Settings
from pseudoreal_trainer.cli.command import main

from tests.support.cluster import Cluster, Job

Json = dict[str, Any]
_SETTINGS = Settings("registry.example/trainer:test", "IfNotPresent", ())


@dataclass(frozen=True)
class Terminal:
    """Runs `pseudoreal` as a user of one kubeconfig, in one namespace."""

    kubeconfig: Path
    namespace: str

    def __call__(self, command: str, *words: str, namespace: str | None = None) -> Result:
        where = [] if "-A" in words else ["-n", namespace or self.namespace]
        return CliRunner().invoke(main, [command, *words, "--kubeconfig", str(self.kubeconfig), *where])

    def says(self, command: str, *words: str) -> str:
        """Return the output of the command. The command must succeed."""
        result = self(command, *words)
        assert result.exit_code == 0, result.output
        return result.stdout


@pytest.fixture
def terminal(control_plane: ControlPlane, cluster: Cluster) -> Terminal:
    return Terminal(control_plane.kubeconfig, cluster.namespace)


@pytest.fixture
def user(control_plane: ControlPlane, cluster: Cluster) -> Terminal:
    """A user without any rights."""
    return Terminal(control_plane.user("nobody")[1], cluster.namespace)


def ago(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def training(**changes: Any) -> Json:
    """Return a status in phase real."""
    progress = {
        "step": 15,
        "totalSteps": 20,
        "percent": 75,
        "phaseRemainingSeconds": 3600,
        "tokens": 3840,
        "loss": "3.2500",
        "validationLoss": "3.5000",
        "tokensPerSecond": "12.8",
        "lastUpdatedTime": ago(0),
    }
    return {
        "state": "Training",
        "currentPhase": "real",
        "execution": 1,
        "progress": progress,
        "replicas": {"desired": 2, "ready": 2, "failed": 0},
        "phases": [
            {"name": "pseudo", "state": "Complete", "step": 10, "loss": "4.2500", "startTime": ago(900)},
            {"name": "real", "state": "Training", "startCheckpoint": "real-10", "startTime": ago(600)},
        ],
    } | changes


@pytest.fixture
def make_job(cluster: Cluster) -> Callable[..., Job]:
    """Function for creating a job with the given status."""

    def make(name: str, status: Json | None = None, **changes: Any) -> Job:
        job = cluster.create(name, **changes)
        if status:
            cluster.patch_status(name, status)
        return job

    return make


def make_pods(job: Job, execution: int = 1, *, node: str = "", runs: bool = True) -> list[Json]:
    """Create the pods of the second phase, like the controllers from the operator's Job; with `runs`, bind and start
    them.

    All pods run on `node`, by default each on a node of its own, gpu-N.
    """
    read = PseudoRealJob.from_object(job.body)
    stage, status = Stage(1, read.spec.phases[1].name, StageKind.TRAIN), PseudoRealJobStatus(execution=execution)
    manifest: Any = children(read, stage, status, _SETTINGS)[-1]
    client.BatchV1Api(job.cluster.api).create_namespaced_job(job.cluster.namespace, manifest)
    pods = job.pods(f"{job.name}-{stage.phase}-e{execution}", read.spec.phases[1].workers)
    for number, pod in enumerate(pods if runs else ()):
        job.bind(pod, node or f"gpu-{number}")
        job.start(pod)
    return pods
