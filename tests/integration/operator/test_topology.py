"""Topology domain of a pod's node as seen by the pod, with a real API server."""

from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client
from pseudoreal_api.wire.reports import TOPOLOGY_DOMAIN

from tests.support.cluster import Cluster
from tests.support.patience import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("shared_operator")]

ZONE = "topology.kubernetes.io/zone"


@pytest.fixture
def node(cluster: Cluster) -> Iterator[str]:
    """A node in a zone, after the API server's admission plugin has seen it."""
    core, name = client.CoreV1Api(cluster.api), f"node-{cluster.namespace}"[:63].strip("-")
    made: Any = {"metadata": {"name": name, "labels": {ZONE: "zone-7"}}}
    core.create_node(made)
    containers = [{"name": "any", "image": "any"}]
    tried: Any = {"metadata": {"name": "tried"}, "spec": {"nodeName": name, "containers": containers}}

    def is_heard_of() -> bool:
        found: Any = core.create_namespaced_pod(cluster.namespace, tried, dry_run="All")
        return ZONE in (found.metadata.labels or {})

    wait_for("the zone of a pod on the node", is_heard_of)
    yield name
    core.delete_node(name)


def test_a_pod_reads_its_topology_domain_from_the_zone_of_its_node(cluster: Cluster, node: str) -> None:
    job = cluster.create("near", spec__scheduling={"topology": {"preferred": ZONE}})
    (pod,) = job.pods("near-pseudo-e1")
    job.bind(pod, node)
    (bound,) = job.pods("near-pseudo-e1")
    (container,) = bound["spec"]["containers"]
    (domain,) = (variable for variable in container["env"] if variable["name"] == TOPOLOGY_DOMAIN)
    assert domain["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.labels['{ZONE}']"
    assert bound["metadata"]["labels"][ZONE] == "zone-7"
