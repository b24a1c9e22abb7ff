"""The children of realistic jobs, as a real API server would take them: its validation, in a dry run."""

import json
import subprocess

import pytest
from pseudoreal_dev.cluster import binaries
from pseudoreal_dev.cluster.control_plane import ControlPlane

from tests import golden

pytestmark = pytest.mark.integration

# What the Pod Security Standard "restricted" holds against them; the others meet it.
_VIOLATIONS = {
    "host-network": "host namespaces (hostNetwork=true)",
    "huge-pages": 'must not include "IPC_LOCK" in securityContext.capabilities.add',
    "infiniband": 'must not include "IPC_LOCK" in securityContext.capabilities.add',
    "roce": 'must not include "IPC_LOCK" in securityContext.capabilities.add',
}


@pytest.fixture(scope="module")
def kubectl(control_plane: ControlPlane) -> list[str]:
    command = [str(binaries.build().path("kubectl")), f"--kubeconfig={control_plane.kubeconfig}"]
    namespaces = {golden.job(name)["metadata"]["namespace"] for name in golden.names()}
    for namespace in namespaces:
        subprocess.run([*command, "create", "namespace", namespace], check=True)
        warn = "pod-security.kubernetes.io/warn=restricted"
        subprocess.run([*command, "label", "namespace", namespace, warn], check=True)
    return command


@pytest.mark.parametrize("name", golden.names())
def test_the_api_server_takes_the_children(kubectl: list[str], name: str) -> None:
    children = json.dumps({"apiVersion": "v1", "kind": "List", "items": golden.manifests(name)})
    command = [*kubectl, "apply", "--server-side", "--dry-run=server", "--output=name", "-f", "-"]
    answer = subprocess.run(command, input=children, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    assert (_VIOLATIONS.get(name) or "") in answer.stderr
    assert len(answer.stderr.splitlines()) == (name in _VIOLATIONS)
    assert len(answer.stdout.splitlines()) == len(golden.manifests(name))


def test_the_api_server_judges_what_schemas_cannot(kubectl: list[str]) -> None:
    """Huge pages without memory: the dry run does reach the rules behind the schemas."""
    job = next(m for m in golden.manifests("huge-pages") if m["kind"] == "Job")
    broken = json.loads(json.dumps(job))
    (trainer,) = broken["spec"]["template"]["spec"]["containers"]
    trainer["resources"] = {"limits": {"hugepages-2Mi": "5Gi"}}
    command = [*kubectl, "apply", "--server-side", "--dry-run=server", "-f", "-"]
    answer = subprocess.run(command, input=json.dumps(broken), capture_output=True, text=True, timeout=60)
    assert "HugePages require cpu or memory" in answer.stderr
