"""The control plane used by the other integration tests."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pseudoreal_dev.cluster.binaries import build
from pseudoreal_dev.cluster.control_plane import ControlPlane
from pseudoreal_dev.machine import processes

from tests.support.kubectl import Kubectl

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    arguments = ["--feature-gates=MutatingAdmissionPolicy=false"]
    with ControlPlane(tmp_path_factory.mktemp("control"), api_server_arguments=arguments) as started:
        yield started


def test_the_api_server_reports_the_version_of_its_source(control: ControlPlane) -> None:
    versions = json.loads(Kubectl(control.kubeconfig).said("version", "-o", "json"))
    assert versions["serverVersion"]["gitVersion"] == versions["clientVersion"]["gitVersion"]
    assert versions["serverVersion"]["gitVersion"].startswith("v1.")


def test_arguments_reach_the_api_server(control: ControlPlane) -> None:
    metrics = Kubectl(control.kubeconfig).said("get", "--raw", "/metrics").splitlines()
    gates = [line for line in metrics if line.startswith("kubernetes_feature_enabled")]
    assert any('name="MutatingAdmissionPolicy"' in line and line.endswith(" 0") for line in gates)


def test_the_controllers_create_the_pods_of_a_job(control: ControlPlane) -> None:
    container = {"name": "c", "image": "none.invalid/none"}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    spec = {"completionMode": "Indexed", "completions": 2, "parallelism": 2, "template": template}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "pair"}, "spec": spec}
    Kubectl(control.kubeconfig).said("apply", "-f", "-", body=job)
    condition = "--for=jsonpath={.status.active}=2"
    Kubectl(control.kubeconfig).said("wait", condition, "job/pair", "--timeout=60s")
    pods = json.loads(Kubectl(control.kubeconfig).said("get", "pods", "-o", "json"))["items"]
    index = "batch.kubernetes.io/job-completion-index"
    assert sorted(pod["metadata"]["annotations"][index] for pod in pods) == ["0", "1"]


def test_only_the_owner_can_read_the_kubeconfig(control: ControlPlane) -> None:
    assert control.kubeconfig.stat().st_mode & 0o077 == 0


def test_a_killed_api_server_restarts_with_its_data(tmp_path: Path) -> None:
    with ControlPlane(tmp_path) as control:
        Kubectl(control.kubeconfig).said("create", "configmap", "kept")
        control.kill_api_server()
        assert not control.server.finds("/readyz")
        control.start_api_server(build())
        assert "kept" in Kubectl(control.kubeconfig).said("get", "configmaps", "--output=name")
        # The authority is the one of before: certificates from before and from now are for the same cluster.
        _, kubeconfig = control.user("late", ["system:masters"])
        assert Path(kubeconfig).exists()
        assert "kept" in Kubectl(Path(kubeconfig)).said("get", "configmaps", "--output=name")


def test_no_process_outlives_the_cluster(tmp_path: Path) -> None:
    with ControlPlane(tmp_path) as control:
        started = control.processes
        assert all(map(processes.is_running, started))
        assert control.server.finds("/readyz")
    assert len(started) == 3
    assert not any(map(processes.is_running, started))
    assert not control.server.finds("/readyz")
