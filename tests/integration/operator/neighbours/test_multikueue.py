"""MultiKueue dispatches a whole job to another cluster, to be run by the operator there: two API servers, each with a
Kueue and an operator.

The tests create and finish the Workload of such a job.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from pseudoreal_api.base import API_VERSION, KIND
from pseudoreal_dev.cluster.control_plane import ControlPlane

from tests.support import kueue
from tests.support.cluster import Cluster, Job, complete_stage
from tests.support.installed import binding, install, make_namespace
from tests.support.kueue import Kueue
from tests.support.names import OPERATOR
from tests.support.operator_process import Operator
from tests.support.patience import wait_for
from tests.support.writers import verbs_on

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.usefixtures("shared_operator")]

CONTROLLER = "kueue.x-k8s.io/multikueue"
GPU, FLAVOR, QUEUE, CARRIED = "nvidia.com/gpu", "any-node", "gpus", "carried"


@dataclass(frozen=True)
class Worker:
    """Target cluster of dispatched jobs."""

    kubeconfig: Path
    queues: Kueue


@pytest.fixture(scope="module")
def worker(tls: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("worker")
    with ControlPlane(folder / "control-plane") as plane:
        admin = install(plane)
        client.RbacAuthorizationV1Api(admin).create_cluster_role_binding(binding("ClusterRole", OPERATOR))
        operator = Operator(plane.user(OPERATOR)[1], "", folder / "operator.log", tls)
        operator.start()
        with kueue.running(plane, admin, folder) as queues:
            queues.flavor(FLAVOR, {})
            yield Worker(plane.kubeconfig, queues)
        operator.kill()
        operator.check()


@pytest.fixture(scope="module")
def manager(
    control_plane: ControlPlane, admin: client.ApiClient, worker: Worker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kueue]:
    """Kueue of the cluster with the users' jobs."""
    with kueue.running(control_plane, admin, tmp_path_factory.mktemp("manager")) as queues:
        queues.flavor(FLAVOR, {})
        source = {"kubeConfig": {"locationType": "Path", "location": str(worker.kubeconfig)}}
        queues.create("multikueueclusters", _body("MultiKueueCluster", "worker", clusterSource=source))
        queues.create("multikueueconfigs", _body("MultiKueueConfig", CARRIED, clusters=["worker"]))
        parameters = {"apiGroup": kueue.GROUP, "kind": "MultiKueueConfig", "name": CARRIED}
        check = _body("AdmissionCheck", CARRIED, controllerName=CONTROLLER, parameters=parameters)
        queues.create("admissionchecks", check)
        yield queues


def _body(kind: str, name: str, **spec: Any) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"name": name}, "spec": spec}


@pytest.fixture
def there(manager: Kueue, worker: Worker, cluster: Cluster) -> Cluster:
    """The test's namespace in the other cluster, with a queue in each cluster: two GPUs, the job's maximum."""
    checks = {"admissionChecksStrategy": {"admissionChecks": [{"name": CARRIED}]}}
    for queues, fields in ((manager, checks), (worker.queues, {})):
        queues.cluster_queue(cluster.namespace, FLAVOR, GPU, 2, **fields)
    namespace = make_namespace(worker.queues.api, cluster.namespace)
    for queues in (manager, worker.queues):
        queues.local_queue(cluster.namespace, QUEUE, cluster.namespace)
    return namespace


def create(cluster: Cluster) -> Job:
    """Create a job for MultiKueue, with a Workload as large as its largest phase."""
    job = cluster.create("llm", spec__managedBy=CONTROLLER)
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": "llm", "uid": job.body["metadata"]["uid"]}
    container = {"name": "trainer", "image": "none", "resources": {"requests": {GPU: "1"}, "limits": {GPU: "1"}}}
    pods = {"name": "main", "count": 2, "template": {"spec": {"containers": [container], "restartPolicy": "Never"}}}
    body = {
        "apiVersion": f"{kueue.GROUP}/{kueue.VERSION}",
        "kind": "Workload",
        "metadata": {"name": "llm", "ownerReferences": [owner | {"controller": True}]},
        "spec": {"queueName": QUEUE, "podSets": [pods]},
    }
    custom = client.CustomObjectsApi(cluster.api)
    custom.create_namespaced_custom_object(kueue.GROUP, kueue.VERSION, cluster.namespace, "workloads", body)
    return job


def finish_workload(cluster: Cluster) -> None:
    """Mark the Workload as finished, like its owner after the end of the job."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {"type": "Finished", "status": "True", "reason": "Succeeded", "message": "", "lastTransitionTime": now}
    (found,) = workloads(cluster)
    status = {"status": {"conditions": [*found["status"]["conditions"], condition]}}
    client.CustomObjectsApi(cluster.api).patch_namespaced_custom_object_status(
        kueue.GROUP, kueue.VERSION, cluster.namespace, "workloads", "llm", status
    )


def workloads(cluster: Cluster) -> list[dict[str, Any]]:
    return cluster.list(f"apis/{kueue.GROUP}/{kueue.VERSION} workloads")


def carried(there: Cluster, cluster: Cluster) -> Job:
    """Wait for the job in the other cluster, and return it."""
    wait_for("the job in the other cluster", lambda: there.find("llm"), lambda: workloads(cluster))
    return Job(there, "llm")


def wait_for_same_status(job: Job, other: Job) -> None:
    wait_for("the same status", lambda: job.body.get("status") == other.body["status"], lambda: job.body.get("status"))


def test_multikueue_runs_a_job_in_the_worker_cluster_and_copies_its_status_back(
    cluster: Cluster, there: Cluster, audit_log: Path
) -> None:
    job = create(cluster)
    other = carried(there, cluster)
    assert "managedBy" not in other.body["spec"]
    complete_stage(other, "pseudo")
    complete_stage(other, "delink")
    assert [workload["metadata"]["name"] for workload in workloads(there)] == ["llm"], "its Jobs have none of their own"
    other.wait("the real phase", lambda status: status.current_phase == "real")
    wait_for_same_status(job, other)
    complete_stage(other, "real")
    job.wait("the end, as the other cluster has it", lambda status: status.state == "Complete")
    wait_for_same_status(job, other)
    for resource in ("jobs", "pods", "services", "pseudorealjobs"):
        assert verbs_on(resource, audit_log, cluster.namespace) <= {"get", "list"}, "this operator leaves it alone"

    finish_workload(there)
    wait_for("the end of the other job", lambda: there.find("llm") is None)
    (workload,) = workloads(cluster)
    assert any(one["type"] == "Finished" for one in workload["status"]["conditions"])
    assert job.status.state == "Complete"


def test_deleting_a_job_deletes_it_in_the_worker_cluster(cluster: Cluster, there: Cluster) -> None:
    create(cluster)
    carried(there, cluster).run("llm-pseudo-e1")
    cluster.delete_job("llm")
    wait_for("the end of the other job", lambda: there.find("llm") is None)
    wait_for("the end of its Jobs", lambda: not there.list("apis/batch/v1 jobs"))
    assert workloads(there) == []


def test_a_job_deleted_in_the_worker_cluster_is_created_again(cluster: Cluster, there: Cluster) -> None:
    create(cluster)
    first = carried(there, cluster).body["metadata"]["uid"]
    there.delete_job("llm")

    def second() -> bool:
        found = there.find("llm")
        return found is not None and found["metadata"]["uid"] != first

    wait_for("another job in its place", second)


def test_a_job_is_a_new_remote_job_after_it_lost_its_quota(cluster: Cluster, there: Cluster, worker: Worker) -> None:
    """The new job's checkpoint folder contains another uid, so the new job starts from scratch."""
    create(cluster)
    first = carried(there, cluster)
    first.run("llm-pseudo-e1")
    uid = first.body["metadata"]["uid"]
    worker.queues.stop(cluster.namespace, "HoldAndDrain")

    def is_gone() -> bool:
        found = there.find("llm")
        return found is None or found["metadata"]["uid"] != uid

    wait_for("the end of the first", is_gone)
    worker.queues.stop(cluster.namespace, "None")
    second = carried(there, cluster)
    second.run("llm-pseudo-e1")
    assert second.status.execution == 1
    assert second.body["metadata"]["uid"] != uid
