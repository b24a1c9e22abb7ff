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
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config
from pseudoreal_api import crd
from pseudoreal_dev import binaries, paths
from pseudoreal_dev.control_plane import ControlPlane

from tests.integration.operator.cluster import Cluster, wait_for

USER = "pseudoreal-operator"
CRD = paths.REPOSITORY / "crds" / crd.FILE_NAME
SHUTDOWN_SECONDS = 25.0
"""The grace period of its pod is 30 s."""
CHART = paths.REPOSITORY / "charts" / "pseudoreal"


def _reserved() -> socket.socket:
    """A free port. While it is bound without a listener, connections do not take it, and the operator still can."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


@dataclass
class Operator:
    """A process that can be killed and started again."""

    kubeconfig: Path
    namespace: str
    log: Path
    address: socket.socket = field(default_factory=_reserved)
    process: subprocess.Popen[bytes] | None = None

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
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pseudoreal_operator"], env=environment, stdout=log, stderr=log
            )

    def kill(self) -> None:
        assert self.process is not None, "it was started"
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """As Kubernetes does it; its exit code."""
        assert self.process is not None, "it was started"
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(SHUTDOWN_SECONDS)

    def health(self) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=5) as answer:
            return json.load(answer)


@pytest.fixture(scope="session")
def admin(control_plane: ControlPlane) -> client.ApiClient:
    """With the CustomResourceDefinition installed and the chart's rules in a ClusterRole."""
    api: client.ApiClient = config.new_client_from_config(str(control_plane.kubeconfig))
    kubectl = [binaries.build().path("kubectl"), f"--kubeconfig={control_plane.kubeconfig}"]
    subprocess.run([*kubectl, "apply", "--server-side", "-f", CRD], check=True, stdout=subprocess.DEVNULL)
    # `kubectl wait` fails when the definition has no condition yet, and an established one may still have no storage.
    wait_for(
        "the storage of jobs", lambda: subprocess.run([*kubectl, "get", "prj"], capture_output=True).returncode == 0
    )
    client.RbacAuthorizationV1Api(api).create_cluster_role({"metadata": {"name": USER}, "rules": _chart_rules(api)})
    return api


def _chart_rules(api: client.ApiClient) -> list[dict[str, Any]]:
    version = client.VersionApi(api).get_code().git_version
    command = [binaries.build().path("helm"), "template", "pseudoreal", CHART, f"--kube-version={version}"]
    rendered = subprocess.run(command, check=True, capture_output=True, text=True)
    roles = [doc for doc in yaml.safe_load_all(rendered.stdout) if doc and doc["kind"] == "ClusterRole"]
    rules: list[dict[str, Any]] = next(r["rules"] for r in roles if r["metadata"]["name"] == "pseudoreal")
    return rules


@pytest.fixture
def cluster(admin: client.ApiClient, request: pytest.FixtureRequest) -> Cluster:
    """A namespace of its own for each test."""
    name = request.node.name.replace("_", "-").replace("[", "-").rstrip("]").lower()[:60].strip("-")
    return make_namespace(admin, name)


def make_namespace(admin: client.ApiClient, name: str) -> Cluster:
    """One in which pods can be made, and the operator may work."""
    core = client.CoreV1Api(admin)
    core.create_namespace({"metadata": {"name": name}})
    wait_for("the service account", lambda: core.list_namespaced_service_account(name).items)
    subject = {"kind": "User", "name": USER, "apiGroup": "rbac.authorization.k8s.io"}
    binding = {
        "metadata": {"name": USER},
        "subjects": [subject],
        "roleRef": {"kind": "ClusterRole", "name": USER, "apiGroup": "rbac.authorization.k8s.io"},
    }
    client.RbacAuthorizationV1Api(admin).create_namespaced_role_binding(name, binding)
    return Cluster(admin, name)


@pytest.fixture(scope="session")
def operator_kubeconfig(control_plane: ControlPlane) -> Path:
    return control_plane.user(USER)[1]


@pytest.fixture
def stopped_operator(cluster: Cluster, operator_kubeconfig: Path, tmp_path: Path) -> Iterator[Operator]:
    """Not started yet. Whatever it logs as an error fails the test."""
    operator = Operator(operator_kubeconfig, cluster.namespace, tmp_path / "operator.log")
    yield operator
    if operator.is_running:
        operator.kill()
    text = operator.log.read_text() if operator.log.exists() else ""
    errors = [line for line in text.splitlines() if "Traceback" in line or '"level": "error"' in line]
    assert not errors, "\n".join(errors)


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
