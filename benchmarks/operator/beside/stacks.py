"""Compared stacks: ours and Kubeflow's. Each has a kind of jobs and the controllers for it."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pseudoreal_dev.neighbours import kubeflow

from benchmarks.operator.beside.deployed import Deployment, running
from benchmarks.operator.site import Site
from tests.support.kubectl import Kubectl
from tests.support.load.jobs import RESOURCE, one_phase, two_phases
from tests.support.load.simulator import OURS, PodKind
from tests.support.names import OPERATOR
from tests.support.patience import wait_for

Json = dict[str, Any]

CLIENT_LIMIT = 500
"""Limit of requests per second, as for the controller manager here; for controllers with an option for the limit."""


@dataclass(frozen=True)
class Stack:
    title: str
    jobs: str
    """Group, version and plural of the jobs, separated by slashes."""
    pods: PodKind
    users: tuple[str, ...]
    """User names of the controllers' requests."""
    job: Callable[[str, int], Json]
    """Returns a job with this name and number of pods."""
    running: Callable[[Site], AbstractContextManager[tuple[int, ...]]]
    """Context in which the controllers run; yields their process ids."""
    decides: Callable[[str], bool] = lambda _pod: True
    """Returns whether the job's end depends on the pod with this name."""


@contextmanager
def _ours(site: Site) -> Iterator[tuple[int, ...]]:
    operator = site.start_operator()
    wait_for("the operator", operator.is_ready, operator.said)
    assert operator.process is not None, "start_operator has set the process"
    yield (operator.process.pid,)


def _training_operator_options(_folder: Path, port: int, health: int) -> list[str]:
    served = [f"--health-probe-bind-address=127.0.0.1:{health}", "--metrics-bind-address=0"]
    limits = [f"--kube-api-qps={CLIENT_LIMIT}", f"--kube-api-burst={CLIENT_LIMIT}"]
    return [*served, f"--webhook-server-port={port}", *limits]


_TRAINING_OPERATOR = Deployment(
    name="training-operator",
    namespace="kubeflow",
    service="training-operator",
    secret="training-operator-webhook-cert",
    webhooks={"ValidatingWebhookConfiguration": "validator.training-operator.kubeflow.org"},
    options=_training_operator_options,
)


def _trainer_options(folder: Path, port: int, health: int) -> list[str]:
    config = yaml.safe_load(kubeflow.trainer_configuration().read_text())
    # The limits in `clientConnection` have no effect: the Trainer does not read them, and its client has none.
    return _configured(folder, port, health, config)


def _configured(folder: Path, port: int, health: int, config: Json) -> list[str]:
    own = {
        "leaderElection": {"leaderElect": False},
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"port": port},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config | own))
    return [f"--config={folder / 'config.yaml'}"]


_TRAINER = Deployment(
    name="trainer",
    namespace="kubeflow-system",
    service="kubeflow-trainer-controller-manager",
    secret="kubeflow-trainer-webhook-cert",
    webhooks={
        "ValidatingWebhookConfiguration": "validator.trainer.kubeflow.org",
        "MutatingWebhookConfiguration": "defaulter.trainer.kubeflow.org",
    },
    options=_trainer_options,
)
_JOBSET_PODS = {"matchExpressions": [{"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"}]}


def _jobset_options(folder: Path, port: int, health: int) -> list[str]:
    kind = {"apiVersion": "config.jobset.x-k8s.io/v1alpha1", "kind": "Configuration"}
    limits = {"clientConnection": {"qps": CLIENT_LIMIT, "burst": CLIENT_LIMIT}}
    return _configured(folder, port, health, kind | limits)


_JOBSET = Deployment(
    name="jobset",
    namespace="jobset-system",
    service="jobset-webhook-service",
    secret="jobset-webhook-server-cert",
    webhooks={
        "ValidatingWebhookConfiguration": "jobset-validating-webhook-configuration",
        "MutatingWebhookConfiguration": "jobset-mutating-webhook-configuration",
    },
    options=_jobset_options,
    selectors={"mpod.kb.io": _JOBSET_PODS, "vpod.kb.io": _JOBSET_PODS},
)


@contextmanager
def _training_operator(site: Site) -> Iterator[tuple[int, ...]]:
    with _deployed(_TRAINING_OPERATOR, kubeflow.training_operator(), site) as process:
        yield (process,)


@contextmanager
def _trainer(site: Site) -> Iterator[tuple[int, ...]]:
    with (
        _deployed(_JOBSET, kubeflow.jobset(), site) as jobset,
        _deployed(_TRAINER, kubeflow.trainer(), site) as trainer,
    ):
        Kubectl(site.control_plane.kubeconfig).said("apply", "-f", str(kubeflow.torch_runtime()))
        yield trainer, jobset


@contextmanager
def _minimal(site: Site) -> Iterator[tuple[int, ...]]:
    server = site.control_plane.server
    pair, _ = site.control_plane.user(_MINIMAL, ["system:masters"])
    paths = [server.authority, pair.certificate, pair.key]
    command = [sys.executable, "-m", "benchmarks.operator.beside.minimal", server.address, server.port, *paths]
    log = site.control_plane.directory / "minimal.log"
    with log.open("wb") as file, subprocess.Popen([*map(str, command)], stdout=file, stderr=file) as process:
        try:
            yield (process.pid,)
            assert process.poll() is None, log.read_text()
        finally:
            process.kill()


@contextmanager
def _jobset(site: Site) -> Iterator[tuple[int, ...]]:
    with _deployed(_JOBSET, kubeflow.jobset(), site) as process:
        yield (process,)


def _deployed(deployment: Deployment, controller: kubeflow.Controller, site: Site) -> AbstractContextManager[int]:
    folder = site.control_plane.directory / deployment.name
    return running(deployment, controller, site.control_plane, site.cluster.api, folder)


def _pytorch_job(name: str, workers: int) -> Json:
    containers = [{"name": "pytorch", "image": "trainer"}]

    def replicas(count: int) -> Json:
        return {"replicas": count, "restartPolicy": "Never", "template": {"spec": {"containers": containers}}}

    others = {"Worker": replicas(workers - 1)} if workers > 1 else {}
    specs = {"Master": replicas(1)} | others
    spec = {"pytorchReplicaSpecs": specs}
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": name}, "spec": spec}


def _train_job(name: str, workers: int) -> Json:
    spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": {"numNodes": workers, "image": "trainer"}}
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": name}, "spec": spec}


def _job_set(name: str, workers: int) -> Json:
    pod = {"restartPolicy": "Never", "containers": [{"name": "node", "image": "trainer"}]}
    job = {"completionMode": "Indexed", "completions": workers, "parallelism": workers, "backoffLimit": 0}
    replicated = {"name": "node", "template": {"spec": job | {"template": {"spec": pod}}}}
    spec = {"replicatedJobs": [replicated], "failurePolicy": {"maxRestarts": 10}}
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": name}, "spec": spec}


def _says_nothing(_labels: Json) -> str:
    return ""


def _is_master(pod: str) -> bool:
    return pod.endswith("-master-0")


_PYTORCH_PODS = PodKind("training.kubeflow.org/job-name", "pytorch", _says_nothing, ends_last=_is_master)
_TRAIN_JOB_PODS = PodKind("jobset.sigs.k8s.io/jobset-name", "node", _says_nothing)
_MINIMAL = "minimal"
"""User name of the controller with the fewest requests."""
_PYTORCH_JOBS, _TRAIN_JOBS = "kubeflow.org/v1/pytorchjobs", "trainer.kubeflow.org/v1alpha1/trainjobs"

ONE_PHASE = Stack("pseudoreal", RESOURCE, OURS, (OPERATOR,), one_phase, _ours)
TWO_PHASES = Stack("pseudoreal, two phases", RESOURCE, OURS, (OPERATOR,), two_phases, _ours)
TRAINING_OPERATOR = Stack(
    "training-operator",
    _PYTORCH_JOBS,
    _PYTORCH_PODS,
    ("training-operator",),
    _pytorch_job,
    _training_operator,
    decides=_is_master,
)
TRAINER = Stack("Trainer and JobSet", _TRAIN_JOBS, _TRAIN_JOB_PODS, ("trainer", "jobset"), _train_job, _trainer)
MINIMAL = Stack("minimal requests", RESOURCE, OURS, (_MINIMAL,), one_phase, _minimal)
STACKS = (ONE_PHASE, TRAINING_OPERATOR, TRAINER, MINIMAL, TWO_PHASES)
JOBSET = Stack(
    "JobSet, jobs recreated",
    "jobset.x-k8s.io/v1alpha2/jobsets",
    _TRAIN_JOB_PODS,
    ("jobset",),
    _job_set,
    _jobset,
)
RESTARTING = (ONE_PHASE, JOBSET)
"""Stacks that replace lost pods."""
