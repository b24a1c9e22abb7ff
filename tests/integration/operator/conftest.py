"""The operator as a process of its own, with the rights that the chart gives it and no more."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config
from pseudoreal_api.publish import crd
from pseudoreal_api.wire.reports import REPORT_PATH
from pseudoreal_dev.cluster import binaries
from pseudoreal_dev.cluster.certificates import Authority
from pseudoreal_dev.cluster.control_plane import ControlPlane
from pseudoreal_dev.machine import paths

from tests.integration.conftest import AUDITED
from tests.integration.operator import chart
from tests.integration.operator.cluster import Cluster
from tests.patience import wait_for

USER = AUDITED
CRD = paths.REPOSITORY / "crds" / crd.FILE_NAME
SHUTDOWN_SECONDS = 25.0
"""The grace period of its pod is 30 s."""


def _reserved() -> socket.socket:
    """A free port. While it is bound without a listener, connections do not take it, and the operator still can."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


@dataclass
class Operator:
    """A process that can be killed and started again. Whatever it logs as an error fails the test, but for
    `expected`."""

    kubeconfig: Path
    namespace: str
    log: Path
    tls: Path | None = None
    """None: without an endpoint."""
    pod: str = ""
    """Empty: without a Lease."""
    address: socket.socket = field(default_factory=_reserved)
    report_address: socket.socket = field(default_factory=_reserved)
    process: subprocess.Popen[bytes] | None = None
    expected: str | None = None

    @property
    def port(self) -> int:
        port: int = self.address.getsockname()[1]
        return port

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        environment = os.environ | {
            "KUBECONFIG": str(self.kubeconfig),
            "PSEUDOREAL_TRAINER_IMAGE": "registry.example/trainer:test",
            "PSEUDOREAL_NAMESPACES": self.namespace,
            "PSEUDOREAL_HEALTH_PORT": str(self.port),
        }
        if self.tls:
            report_port = self.report_address.getsockname()[1]
            environment |= {
                "PSEUDOREAL_TLS_DIRECTORY": str(self.tls),
                "PSEUDOREAL_REPORT_PORT": str(report_port),
                "PSEUDOREAL_REPORT_URL": f"https://127.0.0.1:{report_port}{REPORT_PATH}",
                "PSEUDOREAL_REPORT_CA": str(self.tls / "ca.crt"),
            }
        if self.pod:
            lease = f"{self.namespace}/{chart.RELEASE}"
            environment |= {"PSEUDOREAL_LEASE": lease, "PSEUDOREAL_POD_NAME": self.pod}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pseudoreal_operator"], env=environment, stdout=log, stderr=log
            )

    def kill(self) -> None:
        assert self.process is not None, "it was started"
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Stops the operator as Kubernetes does: its exit code."""
        assert self.process is not None, "it was started"
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(SHUTDOWN_SECONDS)

    def lines(self, event: str) -> list[Any]:
        """What it logged as `event`."""
        text = self.log.read_text() if self.log.exists() else ""
        found = (json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}"))
        return [line for line in found if line["event"] == event]

    def check(self) -> None:
        """Ends it, if it runs; fails for unexpected errors."""
        if self.is_running:
            self.kill()
        text = self.log.read_text() if self.log.exists() else ""
        errors = [line for line in text.splitlines() if "Traceback" in line or '"level": "error"' in line]
        assert not [line for line in errors if self.expected is None or self.expected not in line], "\n".join(errors)

    def health(self) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=5) as answer:
            return json.load(answer)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What the others did is looked at last."""
    items.sort(key=lambda item: item.path.name == "test_rights.py")


@pytest.fixture(scope="session")
def admin(control_plane: ControlPlane) -> client.ApiClient:
    return install(control_plane)


def install(control_plane: ControlPlane) -> client.ApiClient:
    """A client, with the CustomResourceDefinition installed and the chart's rules in a ClusterRole."""
    api: client.ApiClient = config.new_client_from_config(str(control_plane.kubeconfig))
    kubectl = [binaries.build().path("kubectl"), f"--kubeconfig={control_plane.kubeconfig}"]
    subprocess.run([*kubectl, "apply", "--server-side", "-f", CRD], check=True, stdout=subprocess.DEVNULL)
    # `kubectl wait` fails when the definition has no condition yet, and an established one may still have no storage.
    wait_for(
        "the storage of jobs", lambda: subprocess.run([*kubectl, "get", "prj"], capture_output=True).returncode == 0
    )
    rbac, rendered = client.RbacAuthorizationV1Api(api), chart.render()
    for name, given in ((USER, chart.RELEASE), (f"{USER}-reviews", f"{chart.RELEASE}-reviews")):
        rules = chart.find(rendered, "ClusterRole", given)["rules"]
        rbac.create_cluster_role({"metadata": {"name": name}, "rules": rules})
    rbac.create_cluster_role_binding(_binding("ClusterRole", f"{USER}-reviews"))
    return api


@cache
def _lease_rules() -> Any:
    return chart.find(chart.render(), "Role", f"{chart.RELEASE}-lease")["rules"]


def _binding(kind: str, role: str) -> dict[str, Any]:
    return {
        "metadata": {"name": role},
        "subjects": [{"kind": "User", "name": USER, "apiGroup": "rbac.authorization.k8s.io"}],
        "roleRef": {"kind": kind, "name": role, "apiGroup": "rbac.authorization.k8s.io"},
    }


@pytest.fixture
def cluster(admin: client.ApiClient, request: pytest.FixtureRequest) -> Cluster:
    """A namespace of its own for each test."""
    name = request.node.name.replace("_", "-").replace("[", "-").rstrip("]").lower()[:60].strip("-")
    return make_namespace(admin, name)


def make_namespace(admin: client.ApiClient, name: str) -> Cluster:
    """One in which pods can be made, and the operator may work."""
    core, rbac = client.CoreV1Api(admin), client.RbacAuthorizationV1Api(admin)
    core.create_namespace({"metadata": {"name": name}})
    wait_for("the service account", lambda: core.list_namespaced_service_account(name).items)
    rbac.create_namespaced_role_binding(name, _binding("ClusterRole", USER))
    rbac.create_namespaced_role(name, {"metadata": {"name": f"{USER}-lease"}, "rules": _lease_rules()})
    rbac.create_namespaced_role_binding(name, _binding("Role", f"{USER}-lease"))
    return Cluster(admin, name)


@pytest.fixture(scope="session")
def operator_kubeconfig(control_plane: ControlPlane) -> Path:
    return control_plane.user(USER)[1]


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tls.crt, tls.key and ca.crt of the report endpoint."""
    authority = Authority(tmp_path_factory.mktemp("tls"))
    authority.issue("tls", hosts=["127.0.0.1"])
    return authority.folder


@pytest.fixture
def make_operator(
    cluster: Cluster, operator_kubeconfig: Path, tls: Path, tmp_path: Path
) -> Iterator[Callable[[str], Operator]]:
    """Operators by the names of their pods, not started yet. One without a name takes no Lease."""
    made: list[Operator] = []

    def make(pod: str) -> Operator:
        made.append(Operator(operator_kubeconfig, cluster.namespace, tmp_path / f"operator-{pod}.log", tls, pod))
        return made[-1]

    yield make
    for operator in made:
        operator.check()


@pytest.fixture
def stopped_operator(make_operator: Callable[[str], Operator]) -> Operator:
    # Without a Lease: tests of it have operators of their own.
    return make_operator("")


@pytest.fixture
def operator(stopped_operator: Operator) -> Operator:
    stopped_operator.start()
    return stopped_operator


@pytest.fixture
def restart_operator(operator: Operator) -> Callable[[], None]:
    """SIGKILL, and a new one."""

    def restart() -> None:
        operator.kill()
        operator.start()

    return restart
