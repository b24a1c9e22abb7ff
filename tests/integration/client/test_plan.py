"""`plan` for a job on a real API server, with nodes of the test."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from pseudoreal_dev.cluster.control_plane import ControlPlane

from tests.integration.client.conftest import Terminal, make_pods, training
from tests.support.cluster import Cluster, Job
from tests.support.jobs import good_job

pytestmark = pytest.mark.integration

MakeJob = Callable[..., Job]
Json = dict[str, Any]
GPU = "nvidia.com/gpu"
RESOURCES = {"limits": {GPU: "2", "memory": "4Gi", "cpu": "2"}}


@pytest.fixture
def make_node(admin: client.ApiClient, cluster: Cluster) -> Iterator[Callable[..., str]]:
    """Function for creating nodes with four GPUs, 16 cores and 64 GiB. Remaining pods of other tests are on other
    nodes."""
    core, made = client.CoreV1Api(admin), list[str]()

    def make(**allocatable: str) -> str:
        name = f"{cluster.namespace[:40].strip('-')}-{len(made)}"
        node: Any = {"metadata": {"name": name, "labels": {"nvidia.com/gpu.memory": "81559"}}}
        core.create_node(node)
        made.append(name)
        amounts = {GPU: "4", "cpu": "16", "memory": "64Gi", "pods": "110", "ephemeral-storage": "100Gi"} | allocatable
        ready = {"type": "Ready", "status": "True"}
        core.patch_node_status(name, {"status": {"allocatable": amounts, "capacity": amounts, "conditions": [ready]}})
        # What the API server taints as new, the controllers take off from nodes that report.
        core.patch_node(name, {"spec": {"taints": None}})
        return name

    yield make
    for name in made:
        core.delete_node(name)


def test_plan_of_a_job_that_fits_ends_with_0(
    terminal: Terminal, make_job: MakeJob, make_node: Callable[..., str]
) -> None:
    node = make_node()
    job = make_job("llm", spec__phases__1__resources=RESOURCES)
    said = terminal.says("plan", job.name)
    assert "phase pseudo: 1 pod" in said
    assert "the delink into phase real: 1 pod" in said
    assert "phase real: 2 pods, each with 2 cpu, 4.00 GiB memory, 2 nvidia.com/gpu" in said
    assert f"fits: {node} 2" in said


def test_pods_of_other_jobs_use_nodes_and_its_own_do_not(
    terminal: Terminal, make_job: MakeJob, make_node: Callable[..., str]
) -> None:
    node = make_node()
    job = make_job("llm", training(), spec__phases__1__resources=RESOURCES)
    make_pods(job, node=node)
    assert f"fits: {node} 2" in terminal.says("plan", job.name)
    other = make_job("other", spec__phases__1__resources=RESOURCES)
    result = terminal("plan", other.name, "--phase", "real", "--json")
    assert result.exit_code == 1
    delink, real = json.loads(result.stdout)["stages"]
    assert (delink["fits_now"], real["fits"], real["fits_now"]) == (True, True, False)
    assert real["obstacles"] == {node: f"too little {GPU} left"}
    assert real["forecast"]["device"] > 0


def test_plan_of_a_job_too_large_for_all_nodes_ends_with_78(
    terminal: Terminal, make_job: MakeJob, make_node: Callable[..., str]
) -> None:
    make_node(**{GPU: "1"})
    make_job("llm", spec__phases__1__resources=RESOURCES)
    result = terminal("plan", "llm")
    assert result.exit_code == 78
    assert "a pod wants 2 nvidia.com/gpu, and the most that a node has is 1 nvidia.com/gpu" in result.stdout


def test_plan_follows_the_claim_of_the_job(
    terminal: Terminal, cluster: Cluster, make_job: MakeJob, make_node: Callable[..., str], admin: client.ApiClient
) -> None:
    """Each node has room for one pod."""
    nodes, core = [make_node(**{GPU: "2"}) for _ in range(2)], client.CoreV1Api(admin)
    for mode in ("ReadWriteOnce", "ReadWriteMany"):
        spec = {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}}
        body: Any = {"metadata": {"name": mode.lower()}, "spec": spec}
        core.create_namespaced_persistent_volume_claim(cluster.namespace, body)
        volume = {"volume": {"claimName": mode.lower()}}
        make_job(mode.lower(), spec__phases__1__resources=RESOURCES, spec__checkpoint__storage=volume)
    apart = terminal("plan", "readwriteonce", "--phase", "real")
    assert apart.exit_code == 78
    assert "an empty node has room for 1 of 2 pods, which a claim keeps on one node" in apart.stdout
    assert f"fits: {nodes[0]} 1, {nodes[1]} 1" in terminal.says("plan", "readwritemany", "--phase", "real")


def test_option_on_cluster_plans_a_file(
    terminal: Terminal, cluster: Cluster, make_node: Callable[..., str], tmp_path: Path
) -> None:
    node = make_node()
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(good_job("llm", spec__phases__1__resources=RESOURCES)))
    assert f"fits: {node} 2" in terminal.says("plan", str(path), "--on-cluster")
    assert "bytes of a rank" in terminal.says("plan", str(path))
    assert cluster.find("llm") is None


def test_a_user_of_one_namespace_gets_a_plan_for_empty_nodes_or_an_error(
    control_plane: ControlPlane,
    cluster: Cluster,
    make_job: MakeJob,
    make_node: Callable[..., str],
    admin: client.ApiClient,
) -> None:
    user = Terminal(control_plane.user("planner")[1], cluster.namespace)
    make_node()
    make_job("llm", spec__phases__1__resources=RESOURCES)
    _allow(admin, user.namespace, [{"apiGroups": ["pseudoreal.dev"], "resources": ["*"], "verbs": ["get"]}])
    result = user("plan", "llm")
    assert (result.exit_code, "ask for the right to list nodes" in result.stderr) == (4, True)
    _allow(admin, f"{user.namespace}-nodes", [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}])
    result = user("plan", "llm")
    assert (result.exit_code, "nodes are taken to be empty" in result.stderr) == (0, True)


def _allow(admin: client.ApiClient, name: str, rules: list[Json]) -> None:
    rbac = client.RbacAuthorizationV1Api(admin)
    role: Any = {"metadata": {"name": name}, "rules": rules}
    rbac.create_cluster_role(role)
    group = "rbac.authorization.k8s.io"
    binding: Any = {
        "metadata": {"name": name},
        "subjects": [{"kind": "User", "name": "planner", "apiGroup": group}],
        "roleRef": {"kind": "ClusterRole", "name": name, "apiGroup": group},
    }
    rbac.create_cluster_role_binding(binding)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("nothing",), 5, "there is no PseudoRealJob nothing"),
        (("over",), 1, "over has ended (Complete)"),
        (("llm", "--phase", "fake"), 5, "there is no phase fake; there are pseudo, real"),
        (("llm", "--trace", "x.json"), 2, "--trace is for a file alone"),
    ],
    ids=["absent", "over", "phase", "trace"],
)
def test_unknown_ended_and_unreadable_jobs_are_errors(
    terminal: Terminal, make_job: MakeJob, words: tuple[str, ...], code: int, says: str
) -> None:
    make_job("llm")
    make_job("over", training(state="Complete", completionTime="2030-01-01T00:00:00Z"))
    result = terminal("plan", *words)
    assert (result.exit_code, says in result.stderr) == (code, True), result.stderr
