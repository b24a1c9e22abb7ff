"""Permitted contents of a job: the chart's policy on jobs, and the Pod Security Standards, on a real API server."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kubernetes import client

from tests.support import chart
from tests.support.asking import Asking
from tests.support.cluster import Cluster
from tests.support.installed import make_namespace
from tests.support.jobs import good_job
from tests.support.kubectl import Kubectl
from tests.support.patience import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.minors]

Json = dict[str, Any]

Ask = Callable[..., str]


@pytest.fixture(scope="module")
def guarded(admin: client.ApiClient) -> Cluster:
    return make_namespace(admin, "guarded")


@pytest.fixture(scope="module")
def ask(guarded: Cluster, kubectl: Kubectl) -> Iterator[Ask]:
    """Function for running kubectl in a namespace guarded by the chart's policy on jobs; returns its output."""

    def run(*arguments: str, body: Any = None) -> str:
        done = kubectl(*arguments, body=body)
        return done.stdout + done.stderr

    rendered = chart.render(f"--set=watchNamespaces={{{guarded.namespace}}}")
    policies = [document for document in rendered if document["metadata"]["name"] == f"{chart.WIDE}-pods"]
    items = {"apiVersion": "v1", "kind": "List", "items": policies}
    assert run("apply", "-f", "-", body=items).count("created") == 2
    # It takes the API server moments to heed a policy.
    asking = Asking(guarded.api)
    wait_for("the policy", lambda: "denied" in create(asking, _job({"spec": {"hostPID": True}})))
    yield run
    run("delete", "-f", "-", body=items)


@pytest.fixture
def asking(guarded: Cluster, ask: Ask) -> Asking:  # noqa: ARG001 - the policy is there
    return Asking(guarded.api)


def create(asking: Asking, body: Json) -> str:
    return asking.create("apis/pseudoreal.dev/v1alpha1/namespaces/guarded/pseudorealjobs", body)


def _job(template: Json, **changes: Any) -> Json:
    return good_job("asks", spec__pod={"template": template}, **changes)


TOKEN = {"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}
HOST = {"hostPath": {"path": "/"}}


def _trainer(**fields: Any) -> Json:
    return {"containers": [{"name": "trainer", **fields}]}


WEIGHTS = {"type": "HuggingFace", "huggingFace": {"path": "/weights", "volume": HOST}}


@pytest.mark.parametrize(
    ("template", "changes", "says"),
    [
        ({"serviceAccountName": "admin"}, {}, "must not choose a service account"),
        ({"automountServiceAccountToken": True}, {}, "must not choose a service account"),
        ({"automountServiceAccountToken": None}, {}, "must not choose a service account"),
        ({"volumes": [TOKEN]}, {}, "must not choose a service account"),
        ({"volumes": [{"name": "h"} | HOST]}, {}, "no volume of a job may be a hostPath"),
        ({}, {"spec__data": {"path": "/d", "volume": HOST}}, "no volume of a job may be a hostPath"),
        ({}, {"spec__phases__1__offload": {"home": "Disk", "volume": HOST}}, "no volume of a job may be a hostPath"),
        ({}, {"spec__checkpoint__startFrom": WEIGHTS}, "no volume of a job may be a hostPath"),
        ({"volumes": [{"name": "f", "flexVolume": {"driver": "a/b"}}]}, {}, "may be a hostPath or a flexVolume"),
        ({"hostPID": True}, {}, "no container of a job may be privileged"),
        ({"hostIPC": True}, {}, "no container of a job may be privileged"),
        ({"containers": [{"name": "trainer", "securityContext": {"privileged": True}}]}, {}, "may be privileged"),
        ({"initContainers": [{"name": "i", "securityContext": {"privileged": True}}]}, {}, "may be privileged"),
        (
            {"containers": [{"name": "trainer", "securityContext": {"allowPrivilegeEscalation": True}}]},
            {},
            "may be privileged",
        ),
        (_trainer(securityContext={"allowPrivilegeEscalation": None}), {}, "may be privileged"),
        (_trainer(securityContext={"procMount": "Unmasked"}), {}, "may be privileged"),
        (_trainer(securityContext={"capabilities": {"add": ["SYS_MODULE"]}}), {}, "may add capabilities"),
        (_trainer(securityContext={"seccompProfile": {"type": "Unconfined"}}), {}, "may leave seccomp"),
        ({"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}}, {}, "may leave seccomp"),
        ({"securityContext": {"runAsUser": 0}}, {}, "may run as root"),
        ({"securityContext": {"runAsNonRoot": False}}, {}, "may run as root"),
        ({"securityContext": {"runAsNonRoot": None}}, {}, "may run as root"),
        ({"securityContext": None}, {}, "may run as root"),
        (_trainer(securityContext={"runAsUser": 0}), {}, "may run as root"),
        (_trainer(securityContext=None), {}, "may run as root"),
        ({"hostNetwork": True}, {}, "may use the network of its node"),
        ({}, {"spec__network__hostNetwork": True}, "may use the network of its node"),
        (_trainer(ports=[{"containerPort": 80, "hostPort": 80}]), {}, "may use the network of its node"),
        (_trainer(livenessProbe={"tcpSocket": {"host": "192.0.2.1", "port": 1}}), {}, "may use the network of its"),
        ({"nodeName": "control-plane"}, {}, "may name a node"),
        ({"containers": "all"}, {}, "must be of type array"),
    ],
)
def test_the_policy_rejects_privileged_jobs(asking: Asking, template: Json, changes: Json, says: str) -> None:
    assert says in create(asking, _job({"spec": template}, **changes))
    if not changes:
        of_a_phase = {"template": {"spec": template}}
        assert says in create(asking, good_job("asks", spec__phases__1__pod=of_a_phase)), "nor may a phase"


PRIVILEGED: Json = {"template": {"spec": {"hostPID": True}}}


@pytest.mark.parametrize("path", ["spec__pod", "spec__phases__0__pod"])
def test_the_policy_rejects_updates_to_privileged_jobs(ask: Ask, path: str) -> None:
    """The pod fields of a job can change during its suspension."""
    name = path.replace("_", "-")
    apply = ("apply", "--namespace=guarded", "-f", "-")
    assert "created" in ask(*apply, body=good_job(name, spec__suspend=True))
    assert "may be privileged" in ask(*apply, body=good_job(name, spec__suspend=True, **{path: PRIVILEGED}))
    # The update that resumes it may change them as well.
    assert "may be privileged" in ask(*apply, body=good_job(name, **{path: PRIVILEGED}))
    harmless = {"template": {"spec": {"nodeSelector": {"pool": "gpu"}}}}
    assert "configured" in ask(*apply, body=good_job(name, **{path: harmless}))


def test_the_policy_judges_phases_that_an_update_adds(ask: Ask) -> None:
    body = good_job("grows")
    assert "created" in ask("apply", "--namespace=guarded", "-f", "-", body=body)
    phase = {"name": "more", "until": {"step": 30}, "batch": {"sequences": 8}}
    body["spec"]["phases"].append(phase | {"offload": {"home": "Disk", "volume": HOST}})
    assert "may be a hostPath" in ask("apply", "--namespace=guarded", "-f", "-", body=body)


@pytest.mark.parametrize("name", ["plain", "ordinary"])
def test_the_policy_admits_unprivileged_jobs(asking: Asking, name: str) -> None:
    container = {
        "name": "trainer",
        "securityContext": {"privileged": False, "capabilities": {"add": ["IPC_LOCK"]}},
        "envFrom": [{"secretRef": {"name": "s3"}}],
    }
    volumes = [{"name": "s", "secret": {"secretName": "s"}}, {"name": "p", "projected": {"sources": []}}]
    spec = {"nodeSelector": {"pool": "gpu"}, "containers": [container], "volumes": volumes, "hostPID": False}
    spec |= {"automountServiceAccountToken": False, "securityContext": {"runAsUser": None, "fsGroup": 2000}}
    body = good_job("asks") if name == "plain" else _job({"metadata": {"labels": {"a": "b"}}, "spec": spec})
    assert create(asking, body) == ""


@pytest.mark.usefixtures("shared_operator")
def test_pods_that_break_the_pod_security_standard_of_a_namespace_are_rejected(cluster: Cluster) -> None:
    core = client.CoreV1Api(cluster.api)
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    core.patch_namespace(cluster.namespace, {"metadata": {"labels": labels}})
    cluster.create("meets").pods("meets-pseudo-e1")
    adds = _trainer(securityContext={"capabilities": {"add": ["CHOWN"]}})
    job = cluster.create("breaks", spec__pod={"template": {"spec": adds}})

    def refused() -> bool:
        events = cluster.list("api/v1 events")
        return any("violates PodSecurity" in event.get("message", "") for event in events)

    wait_for("the refusal", refused)
    job.wait("the condition", lambda status: any("refuses them" in c.message for c in status.conditions))
    assert "Pod Security" in job.condition("Progressing")["message"]
    assert (job.child_jobs(), job.children("api/v1 pods")) == (["breaks-pseudo-e1"], [])


@pytest.mark.usefixtures("shared_operator")
def test_a_job_that_bypassed_the_policy_gets_no_pods(cluster: Cluster) -> None:
    """Rendered children are judged too: a job may be older than the policy, or in an excluded namespace."""
    job = cluster.create("unseen", spec__pod={"template": {"spec": {"hostPID": True}}})
    says = "admissionPolicy.allow.privileged"
    job.wait("the condition", lambda status: any(says in c.message for c in status.conditions))
    assert (job.child_jobs(), job.children("api/v1 pods")) == ([], [])
