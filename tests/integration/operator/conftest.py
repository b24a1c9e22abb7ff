"""Operators with exactly the chart's rights: a shared one, and private ones for tests to kill."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from pseudoreal_api.base import GROUP, PLURAL, VERSION
from pseudoreal_dev.cluster.certificates import Authority
from pseudoreal_dev.cluster.control_plane import ControlPlane

from tests.support.cluster import Cluster
from tests.support.installed import binding
from tests.support.names import OPERATOR
from tests.support.operator_process import Operator
from tests.support.patience import wait_for


@pytest.fixture(scope="session")
def operator_kubeconfig(control_plane: ControlPlane) -> Path:
    return control_plane.user(OPERATOR)[1]


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with tls.crt, tls.key and ca.crt of the report endpoint."""
    authority = Authority(tmp_path_factory.mktemp("tls"))
    authority.issue("tls", hosts=["127.0.0.1"])
    return authority.folder


@pytest.fixture(scope="session")
def operator_of_all(
    admin: client.ApiClient, operator_kubeconfig: Path, tls: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Operator]:
    """Operator for the whole cluster, the chart's default."""
    _delete_all_jobs(admin)
    client.RbacAuthorizationV1Api(admin).create_cluster_role_binding(binding("ClusterRole", OPERATOR))
    operator = Operator(operator_kubeconfig, "", tmp_path_factory.mktemp("operator") / "log", tls)
    operator.start()
    yield operator
    operator.kill()
    client.RbacAuthorizationV1Api(admin).delete_cluster_role_binding(OPERATOR)


def _delete_all_jobs(admin: client.ApiClient) -> None:
    """Delete the remaining jobs of tests without their own operators."""
    custom = client.CustomObjectsApi(admin)

    def left() -> list[Any]:
        found: Any = custom.list_cluster_custom_object(GROUP, VERSION, PLURAL)
        return [*found["items"]]

    for namespace in {job["metadata"]["namespace"] for job in left()}:
        Cluster(admin, namespace).delete_jobs()
    wait_for("the deletion of all jobs", lambda: not left(), left)


@pytest.fixture
def shared_operator(operator_of_all: Operator, cluster: Cluster) -> Iterator[Operator]:
    """Shared operator; tests must not stop it. Errors in its log during the test fail the test."""
    begin = len(operator_of_all.said())
    yield operator_of_all
    cluster.delete_jobs()
    operator_of_all.check(begin)


@pytest.fixture
def make_operator(
    cluster: Cluster, operator_kubeconfig: Path, tls: Path, tmp_path: Path
) -> Iterator[Callable[[str], Operator]]:
    """Function for creating operators by pod name, without starting them. An operator without a name takes no Lease."""
    made: list[Operator] = []

    def make(pod: str) -> Operator:
        made.append(Operator(operator_kubeconfig, cluster.namespace, tmp_path / f"operator-{pod}.log", tls, pod))
        return made[-1]

    yield make
    for operator in made:
        if operator.is_running:
            operator.kill()
        operator.check()


@pytest.fixture
def stopped_operator(make_operator: Callable[[str], Operator]) -> Operator:
    # Without a Lease: tests of it have operators of their own.
    return make_operator("")


@pytest.fixture
def operator(stopped_operator: Operator) -> Operator:
    """Operator for the test's namespace alone; the test may kill it."""
    stopped_operator.start()
    return stopped_operator


@pytest.fixture
def restart_operator(operator: Operator) -> Callable[[], None]:
    """Function for killing the operator with SIGKILL and starting a new one."""

    def restart() -> None:
        operator.kill()
        operator.start()

    return restart
