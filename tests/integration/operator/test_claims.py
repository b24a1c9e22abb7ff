"""Claims that find no volume: the condition says which line to change, and then the job starts."""

from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client

from tests.support.cluster import Cluster, Job
from tests.support.patience import wait_for
from tests.support.provisioner import REFUSAL, local_path

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("shared_operator")]

UNBOUND = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims."
CLAIM = "mine"


@pytest.fixture
def storage_class(cluster: Cluster) -> Iterator[str]:
    with local_path(cluster.api, cluster.namespace, cluster.namespace, waits=False):
        yield cluster.namespace


def create(cluster: Cluster, volume: dict[str, Any]) -> Job:
    """Create a job of two workers in its first phase."""
    return cluster.create("j", spec__phases__0__workers=2, spec__checkpoint__storage={"volume": volume})


def create_claim(cluster: Cluster, mode: str, **spec: Any) -> None:
    wanted = {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}} | spec
    body: Any = {"metadata": {"name": CLAIM}, "spec": wanted}
    client.CoreV1Api(cluster.api).create_namespaced_persistent_volume_claim(cluster.namespace, body)


def template_of_claim(**spec: Any) -> dict[str, Any]:
    return {"claimTemplate": {"spec": spec}} if spec else {}


def reject(job: Job, child: str = "j-pseudo-e1") -> list[Any]:
    """Let the scheduler find no node for the pods, as it does while a claim is unbound."""
    pods = job.pods(child, 2)
    for pod in pods:
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": UNBOUND}
        job.cluster.patch_pod_status(pod["metadata"]["name"], {"phase": "Pending", "conditions": [condition]})
    return pods


def wait_for_events(cluster: Cluster, text: str) -> None:
    def said() -> list[str]:
        return [event.get("message", "") for event in cluster.list("api/v1 events")]

    wait_for("the event of the claim", lambda: any(text in message for message in said()), said)


def message_with(job: Job, *texts: str) -> str:
    """Wait for a message of the condition Progressing that has all texts."""

    def found() -> str | None:
        message = str(job.condition("Progressing")["message"])
        return message if all(text in message for text in texts) else None

    job.wait("the first conditions", lambda status: bool(status.conditions))
    return wait_for("the message", found, lambda: job.condition("Progressing"))


def affinity_of(pod: Any) -> Any:
    return (pod["spec"].get("affinity") or {}).get("podAffinity")


def test_refused_claim_of_the_operator_is_explained_by_what_the_provisioner_said(
    cluster: Cluster, storage_class: str
) -> None:
    job = create(cluster, template_of_claim(storageClassName=storage_class, accessModes=["ReadWriteMany"]))
    job.pods("j-pseudo-e1", 2)
    wait_for_events(cluster, REFUSAL)
    pods = reject(job)
    text = message_with(job, REFUSAL)
    assert (
        f"j-checkpoints asks for ReadWriteMany, which its storage class {storage_class} (rancher.io/local-path)" in text
    )
    assert "write spec.checkpoint.storage.volume.claimTemplate.spec.accessModes: [ReadWriteOnce]" in text
    assert affinity_of(pods[0]) is None, "the claim is for many nodes"


def test_unbound_claim_is_explained_before_the_scheduler_says_anything(cluster: Cluster, storage_class: str) -> None:
    """A scheduler that waits for a volume says nothing for ten minutes."""
    job = create(cluster, template_of_claim(storageClassName=storage_class, accessModes=["ReadWriteMany"]))
    message_with(job, "The pods get no node.", REFUSAL)
    assert job.condition("Progressing")["reason"] == "ClaimPending"


def test_job_starts_once_the_line_is_changed_as_the_condition_says(cluster: Cluster, storage_class: str) -> None:
    create_claim(cluster, "ReadWriteMany", storageClassName=storage_class)
    job = create(cluster, {"claimName": CLAIM})
    job.pods("j-pseudo-e1", 2)
    wait_for_events(cluster, REFUSAL)
    reject(job)
    text = message_with(job, REFUSAL, f"accessModes: [ReadWriteOnce] in the spec of claim {CLAIM}")
    core = client.CoreV1Api(cluster.api)
    assert f"kubectl delete pvc {CLAIM}" in text
    core.delete_namespaced_persistent_volume_claim(CLAIM, cluster.namespace)
    wait_for("the end of the claim", lambda: not core.list_namespaced_persistent_volume_claim(cluster.namespace).items)
    create_claim(cluster, "ReadWriteOnce", storageClassName=storage_class)
    assert "kubectl delete job j-pseudo-" in text
    cluster.delete_child_job("j-pseudo-e1")
    pods = job.run("j-pseudo-e2", 2)
    assert job.wait("training", lambda status: status.replicas.ready == 2).restarts == 0
    (term,) = affinity_of(pods[0])["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"


def test_claim_that_the_operator_makes_binds_where_one_node_has_a_volume_at_a_time(
    cluster: Cluster, storage_class: str
) -> None:
    job = create(cluster, template_of_claim(storageClassName=storage_class))
    pods, core = job.pods("j-pseudo-e1", 2), client.CoreV1Api(cluster.api)

    def phase() -> Any:
        found: Any = core.read_namespaced_persistent_volume_claim("j-checkpoints", cluster.namespace)
        return found.status.phase

    wait_for("a volume", lambda: phase() == "Bound", phase)
    assert affinity_of(pods[0]) == affinity_of(pods[1])
    assert affinity_of(pods[0]) is not None


def test_class_that_does_not_exist_is_named(cluster: Cluster) -> None:
    """The controller manager reports it, and no provisioner."""
    job = create(cluster, template_of_claim(storageClassName="fsat"))
    message_with(job, "from storage class fsat, which does not exist", "claimTemplate.spec.storageClassName: CLASS")


def test_cluster_without_a_default_class_is_named(cluster: Cluster) -> None:
    job = create(cluster, {})
    message_with(job, "the cluster has no default class", "kubectl get storageclass")


def test_claim_beyond_a_quota_blocks_the_job_with_the_word_of_the_api_server(cluster: Cluster) -> None:
    cluster.set_quota({"requests.storage": "1Mi"})
    job = create(cluster, {})
    text = message_with(job, "exceeded quota", "requests.storage")
    assert job.condition("Progressing")["reason"] == "Blocked"
    assert "j-checkpoints" in text
