"""A real API server and controller manager, shared by all tests of this folder. There are no nodes.

PSEUDOREAL_KUBERNETES chooses an API server of another minor version, for the tests marked `minors`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from kubernetes import client
from pseudoreal_dev.cluster.control_plane import ControlPlane

from tests.support import pod_groups
from tests.support.cluster import Cluster
from tests.support.installed import install, make_namespace
from tests.support.kubectl import Kubectl
from tests.support.minors import KUBERNETES
from tests.support.names import OPERATOR


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests of this folder among themselves."""
    places = [place for place, item in enumerate(items) if item.path.is_relative_to(Path(__file__).parent)]
    ordered = sorted((items[place] for place in places), key=_turn)
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


def _turn(item: pytest.Item) -> int:
    """Return the sort key. The cluster-wide operator runs only after all other operators; test_rights.py checks the use
    of rights and runs last."""
    is_shared = "operator_of_all" in getattr(item, "fixturenames", ())
    return 2 if item.path.name == "test_rights.py" else int(is_shared)


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    folder = tmp_path_factory.mktemp("control-plane")
    rules: list[dict[str, Any]] = [{"level": "Metadata", "users": [OPERATOR]}, {"level": "None"}]
    policy = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": rules}
    (folder / "audit.yaml").write_text(json.dumps(policy))
    arguments = [f"--audit-policy-file={folder / 'audit.yaml'}", f"--audit-log-path={folder / 'audit.log'}"]
    if not KUBERNETES:
        # As Kubernetes 1.35 does by itself: pods have the zone and the region of their node as labels.
        arguments.append("--feature-gates=PodTopologyLabelsAdmission=true")
    with ControlPlane(folder, api_server_arguments=arguments, kubernetes=KUBERNETES) as running:
        yield running


@pytest.fixture(scope="session")
def admin(control_plane: ControlPlane) -> client.ApiClient:
    """Client with all rights, after installation of the CustomResourceDefinition."""
    return install(control_plane)


@pytest.fixture(scope="session")
def pod_group_definitions(admin: client.ApiClient) -> None:
    """Install PodGroup definitions of third-party schedulers."""
    for version in ("scheduling.x-k8s.io/v1alpha1", "scheduling.volcano.sh/v1beta1"):
        pod_groups.define(admin, version)


@pytest.fixture
def cluster(admin: client.ApiClient, request: pytest.FixtureRequest) -> Cluster:
    """A namespace for the test alone. Long names of tests are cut, so a checksum keeps them apart."""
    name = request.node.name.replace("_", "-").replace("[", "-").rstrip("]").lower()[:50].strip("-")
    return make_namespace(admin, f"{name}-{crc32(request.node.name.encode()):08x}")


@pytest.fixture(scope="session")
def kubectl(control_plane: ControlPlane) -> Kubectl:
    return Kubectl(control_plane.kubeconfig)


@pytest.fixture(scope="session")
def audit_log(control_plane: ControlPlane) -> Path:
    """Audit log of the API server, with one JSON object per line."""
    return control_plane.directory / "audit.log"
