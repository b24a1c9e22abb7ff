"""Permissions of the operator's account, for any holder of its token: the chart's admission policies on a real API
server.

RBAC is bypassed: the account has every right, so only the policies can refuse a request.
"""

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kubernetes import client
from pseudoreal_api.wire.reports import REPORT_AUDIENCE
from pseudoreal_operator.observe.stages import Stage

from tests import golden
from tests.support import chart
from tests.support.asking import Asking
from tests.support.cluster import Cluster
from tests.support.jobs import good_job
from tests.support.kubectl import Kubectl
from tests.support.minors import since
from tests.support.names import OPERATOR
from tests.support.patience import wait_for
from tests.unit.operator.manifests.support.rendered import DELINK, SITE, TRAIN, rendered

pytestmark = [pytest.mark.integration, pytest.mark.minors]

Json = dict[str, Any]

NAMESPACE = "account"
OWNER: Json = {
    "apiVersion": "pseudoreal.dev/v1alpha1",
    "kind": "PseudoRealJob",
    "name": "j",
    "uid": "",
    "controller": True,
}
LABELS = {"pseudoreal.dev/job-uid": "", "pseudoreal.dev/job-name": "j"}
"""Labels and owner get the uid of an existing job, because the garbage collector deletes objects with a missing
owner."""
OURS: Json = {"labels": LABELS, "ownerReferences": [OWNER]}
JOBS = f"apis/batch/v1/namespaces/{NAMESPACE}/jobs"
PATHS = {
    "Job": "apis/batch/v1/namespaces/{}/jobs",
    "Service": "api/v1/namespaces/{}/services",
    "NetworkPolicy": "apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "PersistentVolumeClaim": "api/v1/namespaces/{}/persistentvolumeclaims",
    "PodGroup": "apis/scheduling.x-k8s.io/v1alpha1/namespaces/{}/podgroups",
    "Secret": "api/v1/namespaces/{}/secrets",
}
TEMPLATE: Json = {
    "spec": {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True},
        "containers": [{"name": "trainer", "image": "i", "securityContext": {"allowPrivilegeEscalation": False}}],
    }
}
SPECS: Json = {
    "Job": {"spec": {"template": TEMPLATE}},
    "Service": {"spec": {"clusterIP": "None", "selector": LABELS, "ports": [{"port": 1}]}},
    "NetworkPolicy": {"spec": {"podSelector": {"matchLabels": LABELS}, "policyTypes": ["Ingress"]}},
    "PersistentVolumeClaim": {
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    },
    "PodGroup": {"spec": {"minMember": 1}},
    "Secret": {"immutable": True},
}
CHILDREN = "only children of a PseudoRealJob"


def of(kind: str, metadata: Json | None = None, **changes: Any) -> Json:
    version = PATHS[kind].partition("/namespaces")[0].partition("/")[2]
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": "x"} | (OURS if metadata is None else metadata),
        **copy.deepcopy(SPECS[kind]),
        **changes,
    }


@pytest.fixture(scope="module")
def admin_asks(admin: client.ApiClient, pod_group_definitions: None) -> Iterator[Asking]:  # noqa: ARG001
    core = client.CoreV1Api(admin)
    core.create_namespace(client.V1Namespace(metadata=client.V1ObjectMeta(name=NAMESPACE)))
    wait_for("the service account", lambda: core.list_namespaced_service_account(NAMESPACE).items)
    owner = Cluster(admin, NAMESPACE).create(OWNER["name"], spec__suspend=True)
    OWNER["uid"] = LABELS["pseudoreal.dev/job-uid"] = owner.body["metadata"]["uid"]
    yield Asking(admin)
    core.delete_namespace(NAMESPACE)


@pytest.fixture(scope="module")
def asks(admin_asks: Asking) -> Asking:
    """Requests as the operator's account."""
    found = Asking(admin_asks.api, OPERATOR)
    # It takes the API server moments to heed a policy.
    wait_for("the policies", lambda: CHILDREN in found.create(JOBS, of("Job", {})))
    bad = of("Job", spec={"template": _with(TEMPLATE, "spec.hostPID", True)})
    wait_for("the policies", lambda: "may be privileged" in found.create(JOBS, bad))
    return found


def _with(template: Json, path: str, value: Any) -> Json:
    """Return the template with one field set; a number in the path is a list index."""
    made = copy.deepcopy(template)
    *way, last = path.split(".")
    here: Any = made
    for step in way:
        here = here[int(step)] if step.isdigit() else here.setdefault(step, {})
    here[last] = value
    return made


@pytest.mark.parametrize("kind", PATHS)
def test_the_account_policy_lets_the_operator_create_only_children(asks: Asking, admin_asks: Asking, kind: str) -> None:
    path = PATHS[kind].format(NAMESPACE)
    foreign = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "d", "uid": OWNER["uid"], "controller": True}
    not_controlled = {**OWNER, "controller": False}
    strangers: list[Json] = [
        {},
        {"labels": LABELS, "ownerReferences": [foreign]},
        {"labels": LABELS, "ownerReferences": [not_controlled]},
        {"ownerReferences": [OWNER]},
        {"labels": LABELS | {"pseudoreal.dev/job-uid": "another"}, "ownerReferences": [OWNER]},
    ]
    if kind != "PersistentVolumeClaim":
        strangers.append({"labels": LABELS})
    for metadata in strangers:
        assert CHILDREN in asks.create(path, of(kind, metadata)), metadata
    assert asks.create(path, of(kind)) == ""
    assert admin_asks.create(path, of(kind, {})) == "", "others are left alone"


def test_a_retained_claim_has_a_job_name_in_place_of_an_owner(asks: Asking) -> None:
    kept = of("PersistentVolumeClaim", {"labels": {"pseudoreal.dev/job-name": "j"}})
    assert asks.create(PATHS["PersistentVolumeClaim"].format(NAMESPACE), kept) == ""


@pytest.mark.parametrize("kind", PATHS)
def test_the_account_policy_forbids_children_in_system_namespaces(asks: Asking, kind: str) -> None:
    assert "in the namespaces of Kubernetes itself" in asks.create(PATHS[kind].format("kube-system"), of(kind))


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("Service", {"spec": {"type": "LoadBalancer", "selector": LABELS, "ports": [{"port": 1}]}}, "headless"),
        ("Service", {"spec": SPECS["Service"]["spec"] | {"externalIPs": ["192.0.2.1"]}}, "headless"),
        ("Service", {"spec": SPECS["Service"]["spec"] | {"selector": {"app": "bank"}}}, "headless"),
        ("NetworkPolicy", {"spec": {"podSelector": {}, "ingress": [{}]}}, "network policies of the pods of their"),
        ("NetworkPolicy", {"spec": {"podSelector": {"matchLabels": {"app": "bank"}}}}, "network policies of the pods"),
        ("Secret", {"immutable": False}, "only Secrets that never change"),
        ("Secret", {"type": "kubernetes.io/service-account-token"}, "only Secrets that never change"),
    ],
)
def test_the_account_policy_fixes_the_shape_of_children(asks: Asking, kind: str, changes: Json, says: str) -> None:
    if changes.get("type"):
        changes = changes | {
            "metadata": {"name": "x", "annotations": {"kubernetes.io/service-account.name": "default"}} | OURS
        }
    assert says in asks.create(PATHS[kind].format(NAMESPACE), {**of(kind), **changes})


@pytest.mark.parametrize("kind", sorted(PATHS.keys() - {"Job"}))
def test_the_account_policy_limits_updates_and_deletions_to_jobs(asks: Asking, admin_asks: Asking, kind: str) -> None:
    path = PATHS[kind].format(NAMESPACE)
    assert admin_asks.create(path, of(kind), dry_run=False) == ""
    says = "the operator changes and deletes only Jobs"
    assert says in asks.merge(f"{path}/x", {"metadata": {"annotations": {"a": "b"}}})
    assert says in asks.delete(f"{path}/x")
    admin_asks.delete(f"{path}/x", dry_run=False)


def test_the_account_policy_forbids_adopting_foreign_jobs(asks: Asking, admin_asks: Asking) -> None:
    """An update is judged by the existing Job, not by the result of the patch."""
    assert admin_asks.create(JOBS, of("Job", {"name": "bank"}), dry_run=False) == ""
    assert CHILDREN in asks.merge(f"{JOBS}/bank", {"metadata": OURS})
    assert CHILDREN in asks.merge(f"{JOBS}/bank", {"spec": {"suspend": True}})
    assert CHILDREN in asks.delete(f"{JOBS}/bank")
    assert admin_asks.delete(f"{JOBS}/bank") == ""


def test_the_account_policy_allows_one_field_of_child_jobs_to_change(asks: Asking, admin_asks: Asking) -> None:
    spec = {"completions": 1, "completionMode": "Indexed", "backoffLimitPerIndex": 0, "template": TEMPLATE}
    mine = of("Job", {"name": "mine"} | OURS, spec=spec | {"suspend": True})
    assert admin_asks.create(JOBS, mine, dry_run=False) == ""
    says = "of a Job, the operator changes only maxFailedIndexes"
    patches: list[Json] = [
        {"spec": {"suspend": False}},
        {"spec": {"activeDeadlineSeconds": 1}},
        {"spec": {"template": {"spec": {"nodeSelector": {"a": "b"}}}}},
        {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "other"}}},
        {"metadata": {"annotations": {"a": "b"}}},
        {"metadata": {"finalizers": ["a.b/c"]}},
        {"metadata": {"ownerReferences": [OWNER | {"uid": "2"}]}},
    ]
    for patch in patches:
        assert admin_asks.merge(f"{JOBS}/mine", patch) == ""
        assert says in asks.merge(f"{JOBS}/mine", patch), patch
    assert asks.merge(f"{JOBS}/mine", {"spec": {"maxFailedIndexes": 0}}) == ""
    assert asks.delete(f"{JOBS}/mine") == ""


def test_the_account_policy_allows_one_label_of_operator_pods_to_change(asks: Asking, admin_asks: Asking) -> None:
    says = "of pods, the operator changes only the label pseudoreal.dev/leader of its own"
    pods = f"api/v1/namespaces/{NAMESPACE}/pods"
    for name, labels in (("other", {}), ("own", {"app.kubernetes.io/component": "operator", "kept": "yes"})):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, **TEMPLATE}
        assert admin_asks.create(pods, pod, dry_run=False) == ""

    def patch(name: str, metadata: Json, **others: Any) -> str:
        return asks.merge(f"{pods}/{name}", {"metadata": metadata, **others})

    assert patch("own", {"labels": {"pseudoreal.dev/leader": "true"}}) == ""
    assert patch("own", {"labels": {"pseudoreal.dev/leader": None}}) == ""
    assert says in patch("other", {"labels": {"pseudoreal.dev/leader": "true"}})
    assert says in patch("other", {"labels": {"app.kubernetes.io/component": "operator"}}), "it adopts none"
    for metadata in ({"labels": {"kept": "no"}}, {"labels": {"more": "yes"}}, {"labels": {"kept": None}}):
        assert says in patch("own", metadata)
    assert says in patch("own", {"annotations": {"more": "yes"}})
    assert says in patch("own", {"ownerReferences": [{**OWNER, "kind": "Job"}]})
    assert says in patch("own", {}, spec={"containers": [TEMPLATE["spec"]["containers"][0] | {"image": "another"}]})
    assert "the operator makes no pods" in asks.create(pods, pod)


def test_the_account_policy_limits_pod_deletion_to_pods_of_jobs(asks: Asking, admin_asks: Asking) -> None:
    pods = f"api/v1/namespaces/{NAMESPACE}/pods"
    for name, labels in (("stranger", {}), ("child", LABELS)):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, **TEMPLATE}
        assert admin_asks.create(pods, pod, dry_run=False) == ""
    assert "deletes only those of a PseudoRealJob" in asks.delete(f"{pods}/stranger")
    assert asks.delete(f"{pods}/child") == ""


def test_the_account_policy_lets_the_operator_delete_only_jobs_with_a_ttl(asks: Asking, admin_asks: Asking) -> None:
    jobs = f"apis/pseudoreal.dev/v1alpha1/namespaces/{NAMESPACE}/pseudorealjobs"
    says = "the operator changes no PseudoRealJob, and deletes only those with ttlSecondsAfterFinished"
    stays = good_job("stays", spec__suspend=True)
    stays["metadata"]["finalizers"] = ["pseudoreal.dev/old"]
    goes = good_job("goes", spec__suspend=True, spec__deadlines={"ttlSecondsAfterFinished": 60})
    for body in (stays, goes):
        assert admin_asks.create(jobs, body, dry_run=False) == ""
    patches: list[Json] = [
        {"metadata": {"finalizers": None}},
        {"spec": {"suspend": False}},
        {"spec": {"pod": {"image": "evil"}}},
        {"metadata": {"labels": {"a": "b"}}},
        {"metadata": {"annotations": {"a": "b"}}},
        {"metadata": {"finalizers": ["pseudoreal.dev/old", "a.b/c"]}},
    ]
    for patch in patches:
        assert admin_asks.merge(f"{jobs}/stays", patch) == ""
        assert says in asks.merge(f"{jobs}/stays", patch), patch
    assert says in asks.delete(f"{jobs}/stays")
    assert asks.delete(f"{jobs}/goes") == ""
    assert says in asks.create(jobs, good_job("new"))
    admin_asks.merge(f"{jobs}/stays", {"metadata": {"finalizers": None}}, dry_run=False)


def test_the_account_policy_allows_events_of_jobs_and_the_own_lease(asks: Asking) -> None:
    def event(kind: str, version: str) -> str:
        about = {"kind": kind, "apiVersion": version, "name": "x", "namespace": NAMESPACE}
        body = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "e"}, "involvedObject": about}
        return asks.create(f"api/v1/namespaces/{NAMESPACE}/events", body)

    assert event("PseudoRealJob", "pseudoreal.dev/v1alpha1") == ""
    assert "events of PseudoRealJobs only" in event("Pod", "v1")
    assert "events of PseudoRealJobs only" in event("PseudoRealJob", "other.example/v1")
    leases = f"apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
    for name, says in ((chart.RELEASE, ""), ("kube-scheduler", "only its own Lease")):
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": {}}
        assert says in asks.create(leases, body)
        assert says or asks.create(leases, body) == ""


TRAINER = "spec.containers.0"
CONTEXT = f"{TRAINER}.securityContext"
INIT = [{"name": "i", "image": "i", "securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}]
HOST_PROBE = {"httpGet": {"host": "192.0.2.1", "port": 80}}


def _volume(**source: Any) -> list[Json]:
    return [{"name": "v", **source}]


def _projected(**source: Any) -> list[Json]:
    return _volume(projected={"sources": [source]})


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("spec.serviceAccountName", "admin", "must not choose a service account"),
        ("spec.automountServiceAccountToken", True, "must not choose a service account"),
        ("spec.automountServiceAccountToken", None, "must not choose a service account"),
        ("spec.volumes", _projected(serviceAccountToken={"path": "t"}), "must not choose a service account"),
        (
            "spec.volumes",
            _projected(serviceAccountToken={"path": "t", "audience": "vault"}),
            "must not choose a service account",
        ),
        ("spec.volumes", _volume(hostPath={"path": "/"}), "may be a hostPath or a flexVolume"),
        ("spec.volumes", _volume(flexVolume={"driver": "a/b"}), "may be a hostPath or a flexVolume"),
        (f"{TRAINER}.securityContext", {"privileged": True}, "may be privileged"),
        # An older API server drops the field.
        pytest.param(f"{CONTEXT}.procMount", "Unmasked", "may be privileged", marks=since("1.33")),
        (f"{CONTEXT}.allowPrivilegeEscalation", True, "may be privileged"),
        ("spec.hostPID", True, "may be privileged"),
        ("spec.hostIPC", True, "may be privileged"),
        (f"{CONTEXT}.capabilities", {"add": ["SYS_MODULE"]}, "may add capabilities"),
        (f"{CONTEXT}.capabilities", {"add": ["IPC_LOCK", "DAC_READ_SEARCH"]}, "may add capabilities"),
        (f"{CONTEXT}.capabilities", {"add": ["ALL"]}, "may add capabilities"),
        ("spec.initContainers", INIT, "may add capabilities"),
        (f"{CONTEXT}.seccompProfile", {"type": "Unconfined"}, "may leave seccomp"),
        ("spec.securityContext.seccompProfile", {"type": "Unconfined"}, "may leave seccomp"),
        (f"{CONTEXT}.appArmorProfile", {"type": "Unconfined"}, "may leave seccomp"),
        (
            "metadata.annotations",
            {"container.apparmor.security.beta.kubernetes.io/trainer": "unconfined"},
            "may leave seccomp",
        ),
        (f"{CONTEXT}.seLinuxOptions", {"type": "spc_t"}, "may leave seccomp"),
        (f"{CONTEXT}.seLinuxOptions", {"user": "root"}, "may leave seccomp"),
        ("spec.securityContext.sysctls", [{"name": "kernel.msgmax", "value": "1"}], "may leave seccomp"),
        ("spec.securityContext.runAsUser", 0, "may run as root"),
        (f"{CONTEXT}.runAsUser", 0, "may run as root"),
        ("spec.securityContext.runAsNonRoot", False, "may run as root"),
        (f"{CONTEXT}.runAsNonRoot", False, "may run as root"),
        ("spec.securityContext", None, "may run as root"),
        (CONTEXT, None, "may run as root"),
        ("spec.hostNetwork", True, "may use the network of its node"),
        (f"{TRAINER}.ports", [{"containerPort": 80, "hostPort": 80}], "may use the network of its node"),
        (f"{TRAINER}.livenessProbe", HOST_PROBE, "may use the network of its node"),
        (f"{TRAINER}.lifecycle", {"preStop": HOST_PROBE}, "may use the network of its node"),
        ("spec.nodeName", "control-plane", "may name a node"),
    ],
)
def test_the_account_policy_forbids_privileged_child_pods(
    asks: Asking, admin_asks: Asking, path: str, value: Any, says: str
) -> None:
    template = _with(TEMPLATE, path, value)
    if value == "Unmasked":
        template = _with(template, "spec.hostUsers", False)
    body = of("Job", spec={"template": template})
    assert says in asks.create(JOBS, body)
    assert admin_asks.create(JOBS, body) == "", "the API server itself takes it"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (f"{CONTEXT}.capabilities", {"drop": ["ALL"], "add": ["IPC_LOCK"]}),
        (f"{CONTEXT}.runAsUser", 1234),
        (f"{CONTEXT}.seccompProfile", {"type": "RuntimeDefault"}),
        ("spec.volumes", _projected(serviceAccountToken={"path": "t", "audience": REPORT_AUDIENCE})),
        ("spec.initContainers", [{"name": "i", "image": "i"}]),
        ("spec.runtimeClassName", "nvidia"),
    ],
)
def test_the_account_policy_allows_unprivileged_child_pods(asks: Asking, path: str, value: Any) -> None:
    assert asks.create(JOBS, of("Job", spec={"template": _with(TEMPLATE, path, value)})) == ""


@pytest.mark.parametrize("stage", [TRAIN, DELINK], ids=["train", "delink"])
def test_the_account_policy_allows_all_rendered_children(asks: Asking, stage: Stage) -> None:
    for kind, manifest in rendered(stage, 1, {"settings": SITE}).items():
        body = manifest | {"metadata": manifest["metadata"] | {"namespace": NAMESPACE}}
        assert asks.create(PATHS[kind].format(NAMESPACE), body) == ""


# Its PodGroup is of Kubernetes 1.37, which this API server does not serve.
@pytest.mark.parametrize("name", sorted({*golden.names()} - {"gang-native"}))
def test_the_account_policy_allows_the_children_of_realistic_jobs(asks: Asking, name: str) -> None:
    said = {}
    for manifest in golden.manifests(name):
        body = manifest | {"metadata": manifest["metadata"] | {"namespace": NAMESPACE}}
        plural = {"NetworkPolicy": "networkpolicies"}.get(body["kind"], f"{body['kind'].lower()}s")
        root = "api" if "/" not in body["apiVersion"] else "apis"
        said[body["kind"]] = asks.create(f"{root}/{body['apiVersion']}/namespaces/{NAMESPACE}/{plural}", body)
    if name == "host-network":
        assert "admissionPolicy.allow.hostNetwork" in said.pop("Job"), "and where it is allowed, that alone was wrong"
    assert set(said.values()) == {""}


@pytest.mark.usefixtures("asks")
def test_the_policies_name_only_existing_fields(kubectl: Kubectl) -> None:
    """The controller manager type-checks the expressions against the schemas of the matched resources."""

    def checked(part: str) -> Callable[[], Any]:
        def status() -> Any:
            said = kubectl.said("get", "validatingadmissionpolicy", f"{chart.WIDE}-{part}", "-o", "json")
            return json.loads(said).get("status")

        return status

    for part in ("children", "child-pods"):
        status = wait_for("the check of types", checked(part))
        assert status["typeChecking"].get("expressionWarnings", []) == []
