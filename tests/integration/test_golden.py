"""Validation of the children of realistic jobs by a real API server, in a dry run."""

import json

import pytest

from tests import golden
from tests.support.kubectl import Kubectl

pytestmark = [pytest.mark.integration, pytest.mark.minors, pytest.mark.usefixtures("pod_group_definitions")]

DRY_RUN = ("apply", "--server-side", "--dry-run=server", "-f", "-")

# What the Pod Security Standard "restricted" holds against them; the others meet it.
_VIOLATIONS = {
    "host-network": "host namespaces (hostNetwork=true)",
    "huge-pages": 'must not include "IPC_LOCK" in securityContext.capabilities.add',
    "infiniband": 'must not include "IPC_LOCK" in securityContext.capabilities.add',
    "roce": 'must not include "IPC_LOCK" in securityContext.capabilities.add',
}


@pytest.fixture(scope="module", autouse=True)
def _namespaces(kubectl: Kubectl) -> None:
    for namespace in {golden.job(name)["metadata"]["namespace"] for name in golden.names()}:
        kubectl.said("create", "namespace", namespace)
        kubectl.said("label", "namespace", namespace, "pod-security.kubernetes.io/warn=restricted")


# Its PodGroup is of Kubernetes 1.37, and this API server's is older: tests/unit/operator/manifests has its schema.
_TOO_NEW = {"gang-native"}


@pytest.mark.parametrize("name", sorted({*golden.names()} - _TOO_NEW))
def test_the_api_server_accepts_the_children_of_golden_jobs(kubectl: Kubectl, name: str) -> None:
    children = {"apiVersion": "v1", "kind": "List", "items": golden.manifests(name)}
    answer = kubectl(*DRY_RUN, "--output=name", body=children)
    assert answer.returncode == 0, answer.stderr
    assert (_VIOLATIONS.get(name) or "") in answer.stderr
    assert len(answer.stderr.splitlines()) == (name in _VIOLATIONS)
    assert len(answer.stdout.splitlines()) == len(golden.manifests(name))


def test_the_api_server_applies_the_cel_rules(kubectl: Kubectl) -> None:
    """Uses huge pages without memory: the dry run must include validation beyond the schemas."""
    job = next(m for m in golden.manifests("huge-pages") if m["kind"] == "Job")
    broken = json.loads(json.dumps(job))
    (trainer,) = broken["spec"]["template"]["spec"]["containers"]
    trainer["resources"] = {"limits": {"hugepages-2Mi": "5Gi"}}
    assert "HugePages require cpu or memory" in kubectl(*DRY_RUN, body=broken).stderr
