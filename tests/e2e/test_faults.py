"""Faults on a real cluster: training survives the operator, and what cannot run says so."""

from collections.abc import Callable
from typing import Any

import pytest
from pseudoreal_dev.kubectl import Kubernetes

from tests.e2e.conftest import NAMESPACE, Job, wait_for

pytestmark = pytest.mark.e2e
OPERATOR = ("--namespace=pseudoreal", "--selector=app.kubernetes.io/component=operator")
LONG = {"spec__phases__0__until__steps": 250, "spec__phases__1__until__steps": 500, "spec__checkpoint__everySteps": 50}


def _step(status: Any) -> int:
    return status.progress.step if status.progress else 0


def _operators(kubernetes: Kubernetes) -> list[str]:
    ready = []
    for pod in kubernetes.items("pods", *OPERATOR):
        if any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", [])):
            ready.append(pod["metadata"]["uid"])
    return ready


def test_killing_the_operator_does_not_disturb_training(start: Callable[..., Job], kubernetes: Kubernetes) -> None:
    job = start("orphan", **LONG)
    job.wait("training", lambda status: status.phase == "pseudo" and _step(status) > 0, 120)
    trainer = [pod["metadata"]["uid"] for pod in job.pods()]
    (before,) = _operators(kubernetes)
    kubernetes.run("delete", "pods", *OPERATOR, "--grace-period=0", "--force")
    wait_for("a new operator", lambda: set(_operators(kubernetes)) - {before}, 60)
    status = job.wait("the end", lambda status: status.phase in ("Succeeded", "Failed"), 240)
    assert status.phase == "Succeeded"
    assert (status.restarts, status.attempt) == (0, 1)
    assert set(trainer) <= {pod["metadata"]["uid"] for pod in job.pods()}


def test_a_lost_worker_restarts_all_from_the_checkpoint(start: Callable[..., Job], kubernetes: Kubernetes) -> None:
    job = start("wounded", **LONG, spec__restart={"backoffSeconds": 1})
    job.wait("a checkpoint of the real phase", lambda status: status.phase == "real" and _step(status) > 320, 240)
    victim = next(pod["metadata"]["name"] for pod in job.pods() if pod["status"]["phase"] == "Running")
    kubernetes.run("delete", "pod", victim, f"--namespace={NAMESPACE}", "--grace-period=0", "--force")
    status = job.wait("the end", lambda status: status.phase in ("Succeeded", "Failed"), 240)
    assert status.phase == "Succeeded"
    assert status.execution_attempt == 2


def test_a_missing_corpus_fails_the_job_once_with_a_remedy(start: Callable[..., Job]) -> None:
    job = start("nowhere", spec__data__path="corpus/none")
    status = job.wait("the failure", lambda status: status.phase == "Failed", 120)
    failed = next(condition for condition in status.conditions if condition.type == "Failed")
    assert failed.reason == "InvalidJob"
    assert "data.path" in failed.message
    assert "corpus/none" in failed.message
    assert (status.restarts, len(job.pods())) == (0, 1)


def test_more_ranks_than_layers_fails_without_a_pod(start: Callable[..., Job]) -> None:
    job = start("crowded", spec__phases__1__workers=9, spec__phases__1__parallelism={"pipeline": 0})
    status = job.wait("the failure", lambda status: status.phase == "Failed", 30)
    failed = next(condition for condition in status.conditions if condition.type == "Failed")
    assert "9 ranks, more than spec.model.layers 8" in failed.message
    assert job.pods() == []


def test_deleting_a_job_deletes_its_children(start: Callable[..., Job], kubernetes: Kubernetes) -> None:
    job = start("short-lived", **LONG)
    job.wait("training", lambda status: _step(status) > 0, 120)
    kubernetes.run("delete", "prj", job.name, f"--namespace={NAMESPACE}", "--timeout=30s")
    selector = (f"--namespace={NAMESPACE}", f"--selector=pseudoreal.dev/job-name={job.name}")
    wait_for("the children's end", lambda: not kubernetes.items("jobs,pods,services,configmaps", *selector), 150)


def test_uninstalling_leaves_jobs_that_can_be_deleted(start: Callable[..., Job], kubernetes: Kubernetes) -> None:
    """Keep this last in the file: it takes the operator away."""
    job = start("left-behind", spec__data__path="corpus/none")
    job.wait("the failure", lambda status: status.phase == "Failed", 120)
    kubernetes.run_helm("uninstall", "pseudoreal", "--namespace=pseudoreal", "--wait", "--timeout=2m")
    assert kubernetes.find("prj", job.name, f"--namespace={NAMESPACE}"), "crds.keep must keep the jobs"
    kubernetes.run("delete", "prj", job.name, f"--namespace={NAMESPACE}", "--timeout=20s")
