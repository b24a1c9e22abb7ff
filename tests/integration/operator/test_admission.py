"""Who may do what: the chart's admission policies and the Pod Security Standards, on a real API server."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kubernetes import client

from tests.support import chart
from tests.support.cluster import Cluster
from tests.support.installed import make_namespace
from tests.support.jobs import good_job
from tests.support.kubectl import Kubectl
from tests.support.patience import wait_for

pytestmark = pytest.mark.integration

Json = dict[str, Any]

OPERATOR = "--as=system:serviceaccount:operators:pseudoreal"
OWNER = {"apiVersion": "pseudoreal.dev/v1alpha1", "kind": "PseudoRealJob", "name": "j", "uid": "1", "controller": True}
SERVICE = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}, "spec": {"ports": [{"port": 80}]}}
POD: Json = {"restartPolicy": "Never", "containers": [{"name": "trainer", "image": "i"}]}
JOB = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, "spec": {"template": {"spec": POD}}}
Ask = Callable[..., str]


@pytest.fixture(scope="module")
def guarded(admin: client.ApiClient) -> Cluster:
    return make_namespace(admin, "guarded")


@pytest.fixture(scope="module")
def ask(guarded: Cluster, kubectl: Kubectl) -> Iterator[Ask]:
    """kubectl in a namespace that the chart's policies guard; what it says."""

    def run(*arguments: str, body: Any = None) -> str:
        done = kubectl(*arguments, body=body)
        return done.stdout + done.stderr

    rendered = chart.render(f"--set=watchNamespaces={{{guarded.namespace}}}")
    policies = [document for document in rendered if document["kind"].startswith("ValidatingAdmission")]
    items = {"apiVersion": "v1", "kind": "List", "items": policies}
    assert run("apply", "-f", "-", body=items).count("created") == 4
    admin = client.RbacAuthorizationV1Api(guarded.api)
    account: Any = {
        "metadata": {"name": "account"},
        "roleRef": {"kind": "ClusterRole", "name": "cluster-admin", "apiGroup": "rbac.authorization.k8s.io"},
        "subjects": [{"kind": "ServiceAccount", "name": "pseudoreal", "namespace": "operators"}],
    }
    admin.create_namespaced_role_binding(guarded.namespace, account)
    # It takes the API server moments to heed a policy.
    wait_for("the policies", lambda: "denied" in create(run, SERVICE, OPERATOR))
    wait_for("the policies", lambda: "denied" in create(run, _job({"spec": {"hostPID": True}})))
    yield run
    run("delete", "-f", "-", body=items)


def create(ask: Ask, body: Json, *options: str) -> str:
    return ask("create", "--namespace=guarded", "--dry-run=server", *options, "-f", "-", body=body)


def _job(template: Json, **changes: Any) -> Json:
    return good_job("asks", spec__pod={"template": template}, **changes)


@pytest.mark.parametrize("body", [JOB, SERVICE])
def test_the_operator_s_account_makes_only_children(ask: Ask, body: Json) -> None:
    says = "the operator makes, changes and deletes only children of a PseudoRealJob"
    assert says in create(ask, body, OPERATOR)
    foreign = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "d", "uid": "1", "controller": True}
    assert says in create(ask, body | {"metadata": {"name": "x", "ownerReferences": [foreign]}}, OPERATOR)
    assert "created" in create(ask, body | {"metadata": {"name": "x", "ownerReferences": [OWNER]}}, OPERATOR)
    assert "created" in create(ask, body), "others are left alone"


def test_the_operator_s_account_changes_nothing_of_pods_but_which_of_its_own_leads(ask: Ask) -> None:
    says = "of pods, the operator changes only the label pseudoreal.dev/leader of its own"
    for name, labels in (("other", {}), ("own", {"app.kubernetes.io/component": "operator", "kept": "yes"})):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": POD}
        assert "created" in ask("create", "--namespace=guarded", "-f", "-", body=pod)

    def patch(name: str, patch: str) -> str:
        return ask("patch", "pod", name, "--namespace=guarded", "--type=strategic", f"--patch={patch}", OPERATOR)

    leads = '{"metadata": {"labels": {"pseudoreal.dev/leader": %s}}}'
    assert "patched" in patch("own", leads % '"true"')
    assert "patched" in patch("own", leads % "null")
    assert says in patch("other", leads % '"true"')
    assert says in patch("own", '{"metadata": {"labels": {"kept": "no"}}}')
    assert says in patch("own", '{"metadata": {"labels": {"more": "yes"}}}')
    assert says in patch("own", '{"metadata": {"labels": {"kept": null}}}')
    assert says in patch("own", '{"metadata": {"annotations": {"more": "yes"}}}')
    assert says in patch("own", '{"spec": {"containers": [{"name": "trainer", "image": "another"}]}}')


def test_the_operator_s_account_deletes_only_pods_of_jobs(ask: Ask) -> None:
    for name, labels in (("stranger", {}), ("child", {"pseudoreal.dev/job-uid": "1"})):
        metadata = {"name": name, "labels": labels}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": POD}
        assert "created" in ask("create", "--namespace=guarded", "-f", "-", body=pod)
    delete = ("delete", "pod", "--namespace=guarded", "--grace-period=0", OPERATOR)
    assert "denied" in ask(*delete, "stranger")
    assert "deleted" in ask(*delete, "child")


TOKEN = {"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}
HOST = {"hostPath": {"path": "/"}}
WEIGHTS = {"type": "HuggingFace", "huggingFace": {"path": "/weights", "volume": HOST}}


@pytest.mark.parametrize(
    ("template", "changes", "says"),
    [
        ({"serviceAccountName": "admin"}, {}, "must not choose a service account"),
        ({"automountServiceAccountToken": True}, {}, "must not choose a service account"),
        ({"volumes": [TOKEN]}, {}, "must not choose a service account"),
        ({"volumes": [{"name": "h"} | HOST]}, {}, "no volume of a job may be a hostPath"),
        ({}, {"spec__data": {"path": "/d", "volume": HOST}}, "no volume of a job may be a hostPath"),
        ({}, {"spec__phases__1__offload": {"home": "Disk", "volume": HOST}}, "no volume of a job may be a hostPath"),
        ({}, {"spec__checkpoint__startFrom": WEIGHTS}, "no volume of a job may be a hostPath"),
        ({"hostPID": True}, {}, "no container of a job may be privileged"),
        ({"containers": [{"name": "trainer", "securityContext": {"privileged": True}}]}, {}, "may be privileged"),
        ({"initContainers": [{"name": "i", "securityContext": {"privileged": True}}]}, {}, "may be privileged"),
        (
            {"containers": [{"name": "trainer", "securityContext": {"allowPrivilegeEscalation": True}}]},
            {},
            "may be privileged",
        ),
        ({"containers": "all"}, {}, "must be of type array"),
    ],
)
def test_what_a_job_may_not_ask_for(ask: Ask, template: Json, changes: Json, says: str) -> None:
    assert says in create(ask, _job({"spec": template}, **changes))
    if not changes:
        of_a_phase = {"template": {"spec": template}}
        assert says in create(ask, good_job("asks", spec__phases__1__pod=of_a_phase)), "nor may a phase"


PRIVILEGED: Json = {"template": {"spec": {"hostPID": True}}}


@pytest.mark.parametrize("path", ["spec__pod", "spec__phases__0__pod"])
def test_what_a_job_may_not_become(ask: Ask, path: str) -> None:
    """What its pods are can be changed while it is suspended."""
    name = path.replace("_", "-")
    apply = ("apply", "--namespace=guarded", "-f", "-")
    assert "created" in ask(*apply, body=good_job(name, spec__suspend=True))
    assert "may be privileged" in ask(*apply, body=good_job(name, spec__suspend=True, **{path: PRIVILEGED}))
    # The update that resumes it may change them as well.
    assert "may be privileged" in ask(*apply, body=good_job(name, **{path: PRIVILEGED}))
    harmless = {"template": {"spec": {"nodeSelector": {"pool": "gpu"}}}}
    assert "configured" in ask(*apply, body=good_job(name, **{path: harmless}))


def test_a_phase_that_is_added_may_not_ask_for_more(ask: Ask) -> None:
    body = good_job("grows")
    assert "created" in ask("apply", "--namespace=guarded", "-f", "-", body=body)
    phase = {"name": "more", "until": {"step": 30}, "batch": {"sequences": 8}}
    body["spec"]["phases"].append(phase | {"offload": {"home": "Disk", "volume": HOST}})
    assert "may be a hostPath" in ask("apply", "--namespace=guarded", "-f", "-", body=body)


@pytest.mark.parametrize("name", ["plain", "ordinary"])
def test_what_a_job_may_ask_for(ask: Ask, name: str) -> None:
    container = {
        "name": "trainer",
        "securityContext": {"privileged": False},
        "envFrom": [{"secretRef": {"name": "s3"}}],
    }
    volumes = [{"name": "s", "secret": {"secretName": "s"}}, {"name": "p", "projected": {"sources": []}}]
    spec = {"nodeSelector": {"pool": "gpu"}, "containers": [container], "volumes": volumes, "hostPID": False}
    body = good_job("asks") if name == "plain" else _job({"metadata": {"labels": {"a": "b"}}, "spec": spec})
    assert "created" in create(ask, body)


@pytest.mark.usefixtures("shared_operator")
def test_a_namespace_that_enforces_a_standard_gets_no_pod_that_breaks_it(cluster: Cluster) -> None:
    core = client.CoreV1Api(cluster.api)
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    core.patch_namespace(cluster.namespace, {"metadata": {"labels": labels}})
    cluster.create("meets").pods("meets-pseudo-e1")
    job = cluster.create("breaks", spec__pod={"template": {"spec": {"hostPID": True}}})

    def refused() -> bool:
        events = cluster.list("api/v1 events")
        return any("violates PodSecurity" in event.get("message", "") for event in events)

    wait_for("the refusal", refused)
    job.wait("the condition", lambda status: any("refuses them" in c.message for c in status.conditions))
    assert "Pod Security" in job.condition("Progressing")["message"]
    assert (job.child_jobs(), job.children("api/v1 pods")) == (["breaks-pseudo-e1"], [])
