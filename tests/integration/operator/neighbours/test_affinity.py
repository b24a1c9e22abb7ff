"""Placement of a job's three pods by topology, on nine nodes in three zones, with Kubernetes' own scheduler."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client

from tests.support.cluster import Cluster
from tests.support.patience import wait_for
from tests.support.schedulers import CLAIM, PLAIN_SCHEDULER, bound_claim, nodes_for_one_pod_each, placed, said

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.usefixtures("shared_operator", "plain_scheduler")]

PODS, ZONES = 3, 3
ZONE = "topology.kubernetes.io/zone"


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[dict[str, str]]:
    """Three nodes in each zone, each for one pod; the value is the label set for the pods' node selector."""
    core, labels = client.CoreV1Api(cluster.api), {"test": cluster.namespace}
    made = {f"{cluster.namespace}-{n}": labels | {ZONE: f"zone-{n % ZONES}"} for n in range(PODS * ZONES)}
    with nodes_for_one_pod_each(core, made), bound_claim(core, cluster.namespace):
        yield labels


@pytest.mark.parametrize(
    ("topology", "zones"), [({"required": ZONE}, [3]), ({"preferred": ZONE}, [3]), (None, [1, 1, 1])]
)
def test_pods_share_a_zone_and_know_their_topology_domain(
    cluster: Cluster, nodes: dict[str, str], topology: dict[str, str] | None, zones: list[int]
) -> None:
    """The first pod may go anywhere, and the others follow; without a topology, the scheduler spreads them."""
    spec = {"schedulerName": PLAIN_SCHEDULER, "nodeSelector": nodes}
    scheduling: dict[str, Any] = {"topology": topology} if topology else {}
    job = cluster.create(
        "near",
        spec__phases__0__workers=PODS,
        spec__pod={"template": {"spec": spec}},
        spec__scheduling=scheduling,
        spec__checkpoint__storage__volume={"claimName": CLAIM},
    )
    wait_for("a node for each pod", lambda: placed(job) == PODS, lambda: said([job]))
    found = Counter(pod["metadata"]["labels"][ZONE] for pod in job.alive_pods())
    assert sorted(found.values()) == zones
