"""An API server with the CustomResourceDefinition and the operator's RBAC, and namespaces for tests."""

from functools import cache
from typing import Any

from kubernetes import client, config
from pseudoreal_api.publish import crd, policy
from pseudoreal_dev.cluster.control_plane import ControlPlane
from pseudoreal_dev.machine import paths

from tests.support import chart
from tests.support.cluster import Cluster
from tests.support.jobs import good_job
from tests.support.kubectl import Kubectl
from tests.support.names import OPERATOR
from tests.support.patience import wait_for

Json = dict[str, Any]

CRD, POLICY = (paths.REPOSITORY / "crds" / name for name in (crd.FILE_NAME, policy.FILE_NAME))


def install(control_plane: ControlPlane) -> client.ApiClient:
    """Install the CustomResourceDefinition with its policy, the chart's rules as ClusterRoles, and its admission
    policies for the operator; return an administrator's client."""
    api: client.ApiClient = config.new_client_from_config(str(control_plane.kubeconfig))
    kubectl = Kubectl(control_plane.kubeconfig)
    kubectl.said("apply", "--server-side", "-f", str(CRD))
    # `kubectl wait` fails while the definition has no condition, and an established definition may still lack storage.
    wait_for("the storage of jobs", lambda: kubectl("get", "prj").returncode == 0)
    kubectl.said("apply", "--server-side", "-f", str(POLICY))
    # It takes the API server moments to heed a policy.
    bad = good_job("bad", spec__model__layers=3)
    wait_for("the policy", lambda: kubectl("create", "--dry-run=server", "-f", "-", body=bad).returncode != 0)
    rbac, rendered = client.RbacAuthorizationV1Api(api), chart.render()
    for name, given in ((OPERATOR, chart.WIDE), (f"{OPERATOR}-reviews", f"{chart.WIDE}-reviews")):
        rules = chart.find(rendered, "ClusterRole", given)["rules"]
        role: Any = {"metadata": {"name": name}, "rules": rules}
        rbac.create_cluster_role(role)
    rbac.create_cluster_role_binding(binding("ClusterRole", f"{OPERATOR}-reviews"))
    kubectl.said("apply", "-f", "-", body={"apiVersion": "v1", "kind": "List", "items": _guards(rendered)})
    return api


def _guards(rendered: list[Json]) -> list[Json]:
    """Return the chart's admission policies, changed to apply to the test operators' user instead of the service
    account."""
    account = f"'system:serviceaccount:{chart.NAMESPACE}:{chart.RELEASE}'"
    names = {f"{chart.WIDE}-{part}" for part in ("children", "child-pods")}
    found = [document for document in rendered if document["metadata"]["name"] in names]
    for guard in (document for document in found if "Binding" not in document["kind"]):
        (condition,) = guard["spec"]["matchConditions"]
        assert account in condition["expression"]
        condition["expression"] = condition["expression"].replace(account, f"'{OPERATOR}'")
    return found


def binding(kind: str, role: str) -> Any:
    """Return a binding of the role to the operator's user."""
    return {
        "metadata": {"name": role},
        "subjects": [{"kind": "User", "name": OPERATOR, "apiGroup": "rbac.authorization.k8s.io"}],
        "roleRef": {"kind": kind, "name": role, "apiGroup": "rbac.authorization.k8s.io"},
    }


def make_namespace(admin: client.ApiClient, name: str) -> Cluster:
    """Create a namespace for pods, with the operator's rights."""
    core, rbac = client.CoreV1Api(admin), client.RbacAuthorizationV1Api(admin)
    namespace: Any = {"metadata": {"name": name}}
    core.create_namespace(namespace)
    wait_for("the service account", lambda: core.list_namespaced_service_account(name).items)
    rbac.create_namespaced_role_binding(name, binding("ClusterRole", OPERATOR))
    role: Any = {"metadata": {"name": f"{OPERATOR}-lease"}, "rules": _lease_rules()}
    rbac.create_namespaced_role(name, role)
    rbac.create_namespaced_role_binding(name, binding("Role", f"{OPERATOR}-lease"))
    return Cluster(admin, name)


@cache
def _lease_rules() -> Any:
    return chart.find(chart.render(), "Role", f"{chart.RELEASE}-lease")["rules"]
