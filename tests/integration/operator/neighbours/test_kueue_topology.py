"""A real Kueue with a topology, and Kubernetes' own scheduler: pods of jobs on five nodes in two zones."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from pseudoreal_dev.cluster.control_plane import ControlPlane

from tests.support import kueue
from tests.support.cluster import Cluster, Job
from tests.support.kueue import Kueue
from tests.support.patience import wait_for
from tests.support.schedulers import CLAIM, PLAIN_SCHEDULER, bound_claim, nodes_for_one_pod_each, placed, said
from tests.support.writers import verbs_on_jobs, writers_of

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.usefixtures("shared_operator", "plain_scheduler")]

GPU, TOPOLOGY, QUEUE = "nvidia.com/gpu", "places", "gpus"
ZONE, HOST = "topology.kubernetes.io/zone", "kubernetes.io/hostname"
ROOM = {"small": 2, "large": 3}
"""Number of nodes per zone. A node has one GPU, and room for one pod."""


@pytest.fixture(scope="module")
def queues(
    control_plane: ControlPlane, admin: client.ApiClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kueue]:
    with kueue.running(control_plane, admin, tmp_path_factory.mktemp("kueue")) as running:
        running.topology(TOPOLOGY, ZONE, HOST)
        yield running


@pytest.fixture(autouse=True)
def nodes(queues: Kueue, cluster: Cluster) -> Iterator[None]:
    """Nodes for this test alone, and a queue with all their GPUs."""
    core, own = client.CoreV1Api(cluster.api), {"test": cluster.namespace}
    made = {
        f"{cluster.namespace}-{zone}-{n}": own | {ZONE: zone, HOST: f"{cluster.namespace}-{zone}-{n}"}
        for zone, count in ROOM.items()
        for n in range(count)
    }
    with nodes_for_one_pod_each(core, made, **{GPU: "1"}), bound_claim(core, cluster.namespace):
        queues.flavor(cluster.namespace, own, topology=TOPOLOGY)
        queues.cluster_queue(cluster.namespace, cluster.namespace, GPU, sum(ROOM.values()))
        queues.local_queue(cluster.namespace, QUEUE, cluster.namespace)
        yield


def create(cluster: Cluster, name: str, pods: int, **topology: str) -> Job:
    return cluster.create(
        name,
        spec__phases__0__workers=pods,
        spec__phases__0__batch={"sequences": 8 * pods, "microBatches": 2},
        spec__phases__0__resources={"limits": {GPU: "1"}},
        spec__pod={"template": {"spec": {"schedulerName": PLAIN_SCHEDULER}}},
        spec__scheduling={"queue": QUEUE, "topology": topology},
        spec__checkpoint__storage__volume={"claimName": CLAIM},
    )


def zones_of(job: Job, pods: int) -> Counter[str]:
    """Wait until all pods have a node, and return their number per zone."""
    wait_for("a node for each pod", lambda: placed(job) == pods, lambda: said([job]))
    return Counter(pod["metadata"]["labels"][ZONE] for pod in job.alive_pods())


def workload_of(cluster: Cluster, job: Job) -> dict[str, Any]:
    """Return the Workload of the job's only Job."""

    def found() -> dict[str, Any] | None:
        (owner,) = [body["metadata"]["name"] for body in job.children("apis/batch/v1 jobs")]
        workloads = cluster.list(f"apis/{kueue.GROUP}/{kueue.VERSION} workloads")
        return next((one for one in workloads if one["metadata"]["ownerReferences"][0]["name"] == owner), None)

    return wait_for("the Workload", found)


@pytest.mark.parametrize("how", ["required", "preferred"])
def test_kueue_places_all_pods_in_the_zone_with_room(cluster: Cluster, audit_log: Path, how: str) -> None:
    """The scheduler alone would spread the pods, and even one pod in the small zone would be wrong."""
    job = create(cluster, "near", 3, **{how: ZONE})
    assert zones_of(job, 3) == {"large": 3}
    workload = workload_of(cluster, job)
    (asked,) = workload["spec"]["podSets"]
    assert asked["topologyRequest"][how] == ZONE
    (assigned,) = workload["status"]["admission"]["podSetAssignments"]
    assert assigned["topologyAssignment"]["levels"] == [HOST]
    for pod in job.alive_pods():
        assert pod["spec"]["nodeSelector"][HOST] == pod["spec"]["nodeName"], "Kueue has chosen it"
        assert "schedulingGates" not in pod["spec"]
        assert writers_of(pod, "spec", "nodeSelector") == {kueue.MANAGER}
    assert verbs_on_jobs(audit_log, cluster.namespace) <= {"create", "delete", "get", "list", "watch"}


def test_a_phase_larger_than_a_zone_waits_if_required_and_spreads_if_preferred(cluster: Cluster) -> None:
    strict = create(cluster, "strict", 4, required=ZONE)
    strict.wait("the queue", lambda status: status.state == "Queued")

    def refusal() -> str | None:
        conditions = workload_of(cluster, strict)["status"].get("conditions", [])
        return next((one["message"] for one in conditions if one["type"] == "QuotaReserved"), None)

    assert "fit only 3 out of 4 pod(s)" in wait_for("what Kueue says", refusal)
    loose = create(cluster, "loose", 4, preferred=ZONE)
    assert sorted(zones_of(loose, 4)) == ["large", "small"]
    assert (strict.status.state, strict.alive_pods()) == ("Queued", [])
