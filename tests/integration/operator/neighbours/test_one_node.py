"""Jobs whose claim one node has at a time, with Kubernetes' own scheduler and a provisioner as kind and k3s have it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kubernetes import client

from tests.support.cluster import Cluster, Job
from tests.support.patience import wait_for
from tests.support.provisioner import local_path
from tests.support.schedulers import PLAIN_SCHEDULER, nodes_for_one_pod_each, placed, said

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.usefixtures("shared_operator", "plain_scheduler")]

PODS = 2


@contextmanager
def job_on_three_nodes(
    cluster: Cluster, room: int, modes: list[str] | None = None, *, waits: bool = True
) -> Iterator[Job]:
    """Create a job of two workers on nodes with room for so many pods. `modes`: access modes that the user names.
    `waits`: as local-path, the volume is a folder of the first pod's node; else, as block storage, it is of any."""
    core, own = client.CoreV1Api(cluster.api), {"test": cluster.namespace}
    nodes = {f"{cluster.namespace}-{n}": own | {"kubernetes.io/hostname": f"{cluster.namespace}-{n}"} for n in range(3)}
    claim: dict[str, Any] = {"storageClassName": cluster.namespace} | ({"accessModes": modes} if modes else {})
    with (
        nodes_for_one_pod_each(core, nodes, pods=str(room)),
        local_path(cluster.api, cluster.namespace, cluster.namespace, waits=waits),
    ):
        yield cluster.create(
            "one-node",
            spec__phases__0__workers=PODS,
            spec__pod={"template": {"spec": {"schedulerName": PLAIN_SCHEDULER, "nodeSelector": own}}},
            spec__checkpoint__storage={"volume": {"claimTemplate": {"spec": claim}}},
        )


@pytest.mark.parametrize("waits", [True, False], ids=["local-path", "block"])
def test_all_pods_run_on_the_node_of_the_volume(cluster: Cluster, waits: bool) -> None:
    """Block storage ties pods to no node until it is attached: without the affinity, they would be spread."""
    with job_on_three_nodes(cluster, room=4, waits=waits) as job:
        wait_for("a node for each pod", lambda: placed(job) == PODS, lambda: said([job]))
        assert len({pod["spec"]["nodeName"] for pod in job.alive_pods()}) == 1


@pytest.mark.parametrize("waits", [True, False], ids=["local-path", "block"])
def test_job_that_does_not_fit_on_one_node_says_so(cluster: Cluster, waits: bool) -> None:
    with job_on_three_nodes(cluster, room=1, waits=waits) as job:
        wait_for("a node for one pod", lambda: placed(job) == 1, lambda: said([job]))

        def explained() -> bool:
            return "so all 2 pods must run on one node" in job.condition("Progressing")["message"]

        wait_for("the reason", explained, lambda: job.condition("Progressing"))


def test_claim_for_many_nodes_is_refused_while_the_scheduler_waits(cluster: Cluster) -> None:
    with job_on_three_nodes(cluster, room=4, modes=["ReadWriteMany"]) as job:

        def explained() -> bool:
            return "accessModes: [ReadWriteOnce]" in job.condition("Progressing")["message"]

        job.wait("the first conditions", lambda status: bool(status.conditions))
        wait_for("the reason", explained, lambda: job.condition("Progressing"))
