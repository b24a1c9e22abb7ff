"""Injected sidecars running on, nodes rejecting pods, and wrong clocks, on a real API server."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pseudoreal_api.names import CONTAINER
from pseudoreal_api.wire.messages import TerminationMessage

from tests.support.cluster import CHECKPOINTS, RESULTS, Cluster, Job
from tests.support.patience import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("shared_operator")]

PROXY: dict[str, Any] = {
    "spec__pod": {"template": {"spec": {"containers": [{"name": "istio-proxy", "image": "proxy"}]}}},
    "spec__restart": {"backoffSeconds": 0},
}


def state(name: str, **state: Any) -> dict[str, Any]:
    return {"name": name, "image": name, "imageID": "", "ready": False, "restartCount": 0, "state": state}


def end_trainer(job: Job, pod: dict[str, Any], code: int, message: str) -> None:
    """End the trainer container of a pod, but not its proxy. The clock of the pod's node is a day ahead."""
    ended = (datetime.now(UTC) + timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    terminated = {"exitCode": code, "reason": "Completed", "message": message, "finishedAt": ended}
    containers = [state("istio-proxy", running={}), state(CONTAINER, terminated=terminated)]
    status = {"phase": "Running", "containerStatuses": containers}
    job.cluster.patch_pod_status(pod["metadata"]["name"], status)


@pytest.mark.long
def test_a_sidecar_that_runs_on_does_not_keep_a_job_from_ending(cluster: Cluster) -> None:
    """Holds regardless of the Job controller's handling of such deleted pods. Slow: other containers have 15 s to
    end."""
    done, failed = cluster.create("meshed", **PROXY), cluster.create("crashed", **PROXY)
    (well,), (badly,) = done.run("meshed-pseudo-e1"), failed.run("crashed-pseudo-e1")
    said = TerminationMessage(
        outcome="Succeeded", phase="pseudo", execution=1, checkpoint=CHECKPOINTS["pseudo"], **RESULTS["pseudo"]
    )
    end_trainer(done, well, 0, said.to_json())
    end_trainer(
        failed, badly, 1, said.model_copy(update={"outcome": "Failed", "message": "the disk is full"}).to_json()
    )
    done.wait("the name of the container", lambda _: done.condition("Progressing")["reason"] == "SidecarRunsOn")
    status = done.wait("the end of the phase", lambda status: status.phases[0].state == "Complete")
    assert (status.restarts, status.phases[0].end_checkpoint) == (0, CHECKPOINTS["pseudo"])
    (next_pod,) = done.pods("meshed-real-delink-e1")
    status = failed.wait("the second execution", lambda status: status.execution == 2 and status.restart_after is None)
    assert [(fault.reason, fault.pod) for fault in status.faults] == [("PodFailed", badly["metadata"]["name"])]
    for job, kept in ((done, well), (failed, badly)):
        wait_for_end(job, kept["metadata"]["name"])
        job.event("SidecarEnded")
    assert next_pod["metadata"]["name"] in names_of(done)


def wait_for_end(job: Job, pod: str) -> None:
    wait_for("the end of the pod", lambda: pod not in names_of(job), lambda: names_of(job))


def names_of(job: Job) -> list[str]:
    return [pod["metadata"]["name"] for pod in job.children("api/v1 pods")]


def test_a_node_that_rejects_a_pod_is_excluded_without_a_counted_restart(cluster: Cluster) -> None:
    job = cluster.create("refused", spec__restart={"backoffSeconds": 0, "maxRestarts": 0})
    (pod,) = job.pods("refused-pseudo-e1")
    job.bind(pod, "gpu-1")
    rejected = {
        "phase": "Failed",
        "reason": "UnexpectedAdmissionError",
        "message": "Pod was rejected: no healthy devices",
    }
    cluster.patch_pod_status(pod["metadata"]["name"], rejected)
    status = job.wait("the second execution", lambda status: status.execution == 2 and status.restart_after is None)
    assert (status.restarts, status.disruptions[0].reason, status.disruptions[0].node) == (0, "PodRejected", "gpu-1")
    (other,) = job.pods("refused-pseudo-e2")
    required = other["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    field = {"key": "metadata.name", "operator": "NotIn", "values": ["gpu-1"]}
    assert required == {"nodeSelectorTerms": [{"matchFields": [field]}]}
