"""The chart: its rendered objects, and the state preserved by an upgrade."""

import base64
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from pseudoreal_api.wire.reports import REPORT_PATH, REPORT_URL
from pseudoreal_dev.cluster.control_plane import ControlPlane
from pseudoreal_dev.machine.version import read, semantic
from pseudoreal_operator.cluster.lease import IS_LEADER, LEADER_LABEL
from pseudoreal_operator.settings import Lease, Settings, read_settings

from tests.support import chart
from tests.support.chart import IMAGES, KUBE_VERSION, RELEASE, WIDE, find, render
from tests.support.cluster import Cluster
from tests.support.kubectl import Kubectl
from tests.support.prometheus import documented_scrape_configuration
from tests.unit.operator.manifests.support.rendered import TRAIN, rendered

pytestmark = pytest.mark.integration

Json = dict[str, Any]

HOST = "pseudoreal.operators.svc"
_ROLES = {WIDE, f"{WIDE}-reviews", f"{RELEASE}-lease"}
"""Names of the operator's own roles."""


def container(documents: list[Json]) -> Json:
    (found,) = find(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(found)


def environment(documents: list[Json]) -> dict[str, str]:
    """Return the operator's environment in a pod named pod-1."""
    return {entry["name"]: entry.get("value", "pod-1") for entry in container(documents)["env"]}


def write_secret(folder: Path, documents: list[Json]) -> dict[str, bytes]:
    """Write the chart's TLS Secret into a folder, like the kubelet; return its files."""
    files = {name: base64.b64decode(text) for name, text in find(documents, "Secret", "pseudoreal-tls")["data"].items()}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return files


MONITORED = (
    "--set=metrics.trainer=true",
    "--set=metrics.scrapers[0].namespaceSelector.matchLabels.team=monitoring",
    *(f"--set=metrics.{what}.enabled=true" for what in ("serviceMonitor", "podMonitor", "alerts", "dashboard")),
    *(f"--set=metrics.{what}.labels.release=prom" for what in ("serviceMonitor", "podMonitor", "alerts")),
)
"""Values enabling everything about metrics."""


# The shapes that the templates branch on.
@pytest.mark.parametrize(
    "values",
    [
        (),
        ("--set=watchNamespaces={a,b}", "--set=crds.keep=false", "--set=networkPolicy.enabled=true"),
        ("--set=reports.tlsSecret=own", "--set=networkPolicy.enabled=false", "--set=admissionPolicy.enabled=false"),
        ("--set=trainer.ncclConfig=NCCL_IB_HCA=mlx5_0", "--set=replicaCount=1"),
        ("--set=reports.certManager.issuerRef.name=ca", "--set=networkPolicy.from[0].ipBlock.cidr=10.0.0.0/16"),
        MONITORED,
    ],
)
def test_helm_lint_passes(values: tuple[str, ...]) -> None:
    chart.helm("lint", "--strict", KUBE_VERSION, str(chart.CHART), *IMAGES, *values)
    assert render(*values)


def test_the_operator_reads_all_settings_of_the_chart(tmp_path: Path) -> None:
    documents = render("--set=watchNamespaces={a,b}")
    secret = write_secret(tmp_path, documents)
    (mount,) = [m for m in container(documents)["volumeMounts"] if m["name"] == "tls"]
    set_here = {
        name: value.replace(mount["mountPath"], str(tmp_path)) for name, value in environment(documents).items()
    }
    settings = read_settings(set_here)
    assert settings.namespaces == ("a", "b")
    assert settings.lease == Lease("operators", RELEASE, "pod-1")
    assert settings.report_ca == secret["ca.crt"].decode()
    assert settings.reports
    assert Path(settings.reports.key).read_bytes() == secret["tls.key"]
    ports = {port["name"]: port["containerPort"] for port in container(documents)["ports"]}
    assert ports == {"health": Settings.health_port, "reports": settings.reports.port, "metrics": settings.metrics_port}
    assert (settings.trainer_metrics_port, settings.scrapers) == (None, ())


def test_a_rolling_update_keeps_one_operator_available() -> None:
    """A standby pod answers its probes, and a new pod is ready before an old one is removed."""
    deployment = find(render(), "Deployment")["spec"]
    assert deployment["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    probes = [container(render())[f"{probe}Probe"]["httpGet"] for probe in ("startup", "readiness", "liveness")]
    assert probes == [{"path": path, "port": "health"} for path in ("/healthz", "/readyz", "/healthz")]


def test_replicas_are_spread_over_nodes_and_have_a_disruption_budget() -> None:
    documents = render("--set=replicaCount=3")
    deployment, budget = find(documents, "Deployment")["spec"], find(documents, "PodDisruptionBudget")["spec"]
    assert deployment["replicas"] == 3
    pod = deployment["template"]
    assert budget["minAvailable"] == 1
    for spread in pod["spec"]["topologySpreadConstraints"]:
        assert spread["whenUnsatisfiable"] == "ScheduleAnyway", "a cluster of one node has a standby, too"
        assert spread["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert budget["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


@pytest.mark.parametrize("value", ["replicaCount=1", "podDisruptionBudget.enabled=false"])
def test_a_single_replica_has_no_disruption_budget(value: str) -> None:
    assert not [document for document in render(f"--set={value}") if document["kind"] == "PodDisruptionBudget"]


def test_no_mount_is_nested_in_a_read_only_mount() -> None:
    folders = [Path(mount["mountPath"]) for mount in container(render("--set=trainer.ncclConfig=A=1"))["volumeMounts"]]
    assert not [folder for folder in folders if set(folder.parents) & set(folders)]


def test_pods_get_the_address_of_the_report_service() -> None:
    documents = render()
    (port,) = [port for port in find(documents, "Service")["spec"]["ports"] if port["name"] == "reports"]
    assert environment(documents)[REPORT_URL] == f"https://{HOST}:{port['port']}{REPORT_PATH}"
    labels = find(documents, "Deployment")["spec"]["template"]["metadata"]["labels"]
    selector = find(documents, "Service")["spec"]["selector"]
    assert selector.items() <= (labels | {LEADER_LABEL: IS_LEADER}).items()
    assert LEADER_LABEL not in labels, "no pod leads from the start"


@pytest.mark.parametrize("values", [(), ("--set=watchNamespaces={a,b}",)])
def test_the_operator_may_only_create_secrets_and_write_its_own_lease(values: tuple[str, ...]) -> None:
    documents = render(*values)
    rules = [rule for d in documents if d["kind"] in ("Role", "ClusterRole") for rule in d["rules"]]
    assert not [rule for rule in rules if "*" in (*rule["resources"], *rule["verbs"])]
    assert {verb for rule in rules if "secrets" in rule["resources"] for verb in rule["verbs"]} == {"create"}
    lease = find(documents, "Role", "pseudoreal-lease")
    assert lease["metadata"]["namespace"] == "operators"
    written = [rule for rule in lease["rules"] if rule["resources"] == ["leases"] and rule["verbs"] != ["create"]]
    assert [rule.get("resourceNames") for rule in written] == [[RELEASE]]


def test_the_account_policy_covers_each_writable_kind() -> None:
    documents = render()
    roles = [d for d in documents if d["kind"] in ("Role", "ClusterRole") and d["metadata"]["name"] in _ROLES]
    rules = [rule for role in roles for rule in role["rules"]]
    may = {
        (group, resource, operation)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb, operation in (("create", "CREATE"), ("update", "UPDATE"), ("patch", "UPDATE"), ("delete", "DELETE"))
        if verb in rule["verbs"]
    }
    constraints = find(documents, "ValidatingAdmissionPolicy", f"{WIDE}-children")["spec"]["matchConstraints"]
    judged = {
        (group, resource, operation)
        for rule in constraints["resourceRules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for operation in rule["operations"]
    }
    assert len(roles) == len(_ROLES)
    assert may - judged == {
        ("pseudoreal.dev", "pseudorealjobs/status", "UPDATE"),
        # What an admission plugin asks for when a child is given an owner; nothing is written.
        ("pseudoreal.dev", "pseudorealjobs/finalizers", "UPDATE"),
        # An answer, which Kubernetes shows to no policy.
        ("authentication.k8s.io", "tokenreviews", "CREATE"),
        # RBAC names the one that it is.
        ("coordination.k8s.io", "leases", "UPDATE"),
    }


def test_each_role_is_bound_to_the_operator() -> None:
    documents = render("--set=watchNamespaces={a}")
    account = {"kind": "ServiceAccount", "name": RELEASE, "namespace": "operators"}
    bindings = [d for d in documents if d["kind"].endswith("RoleBinding") and account in d["subjects"]]
    bound = sorted((d["metadata"].get("namespace", ""), d["roleRef"]["name"]) for d in bindings)
    assert bound == [("", f"{WIDE}-reviews"), ("a", WIDE), ("operators", "pseudoreal-lease")]


def test_the_service_selects_the_leader_alone_and_before_it_is_ready() -> None:
    """An operator without permissions in one of several namespaces is never ready."""
    documents = render()
    service, pods = find(documents, "Service")["spec"], find(documents, "Deployment")["spec"]["selector"]["matchLabels"]
    assert service["publishNotReadyAddresses"] is True
    assert service["selector"] == pods | {LEADER_LABEL: IS_LEADER}


def test_strict_tls_clients_trust_the_generated_certificate(tmp_path: Path) -> None:
    assert sorted(write_secret(tmp_path, render())) == ["ca.crt", "tls.crt", "tls.key"]
    trusted = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    # The default from Python 3.13 on.
    trusted.verify_flags |= ssl.VERIFY_X509_STRICT
    with _served(tmp_path) as connection, trusted.wrap_socket(connection, server_hostname=HOST) as wrapped:
        certificate = wrapped.getpeercert()
    assert certificate
    years = (ssl.cert_time_to_seconds(str(certificate["notAfter"])) - _begin(certificate)) / (365 * 86400)
    assert round(years) == 10


def test_a_new_certificate_does_not_restart_the_operator() -> None:
    """A restarted operator would know only the new certificate, and pods without news of it only the old one."""
    first, second = render(), render()
    assert find(first, "Secret", "pseudoreal-tls")["data"] != find(second, "Secret", "pseudoreal-tls")["data"]
    assert find(first, "Deployment") == find(second, "Deployment")


def test_the_chart_uses_a_secret_named_by_the_user() -> None:
    documents = render("--set=reports.tlsSecret=mine")
    assert not [document for document in documents if document["kind"] == "Secret"]
    volumes = find(documents, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert {"name": "tls", "secret": {"secretName": "mine"}} in volumes
    assert render("--set=reports.tlsSecret=mine") == documents, "nothing is random in it"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("reports.tlsSecret=Not_A_Name", "/reports/tlsSecret"),
        ("reports.certManager.issuerRef.name=a,reports.tlsSecret=b", "leave one of them empty"),
        ("replicaCount=0", "/replicaCount"),
        ("operator.image.digest=sha256:1", "/operator/image/digest"),
        ("operator.resources.memory=1Gi", "'memory' not allowed"),
        ("reports.port=8443", "'port' not allowed"),
        ("networkPolicy.enabled=maybe", "/networkPolicy/enabled"),
        ("networkPolicy.from[0]=10.0.0.0/16", "/networkPolicy/from/0"),
        ("metrics.scrapers[0]=monitoring", "/metrics/scrapers/0"),
        ("metrics.port=80", "'port' not allowed"),
        ("metrics.podMonitor.interval=often", "/metrics/podMonitor/interval"),
        ("metrics.podMonitor.enabled=true", "set metrics.trainer to true"),
        ("metrics.serviceMonitor.enabled=true", "network policy of the operator lets no Prometheus in"),
        ("metrics.podMonitor.enabled=true,metrics.trainer=true", "network policies of jobs let no Prometheus in"),
        (
            "metrics.podMonitor.enabled=true,metrics.trainer=true,networkPolicy.enabled=false",
            "network policies of jobs let no Prometheus in",
        ),
        ("metrics.alerts.runbooks=https://docs.example//", "/metrics/alerts/runbooks"),
        ("operator.extraEnv[0].name=PSEUDOREAL_LEASE", "/operator/extraEnv/0/name"),
        ("fullnameOverride=Trainers", "/fullnameOverride"),
    ],
)
def test_the_chart_rejects_invalid_values(value: str, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        render(f"--set={value}")


def test_the_network_policy_admits_training_pods() -> None:
    documents = render("--set=networkPolicy.enabled=true", "--set=watchNamespaces={a,b}")
    (rule,) = find(documents, "NetworkPolicy")["spec"]["ingress"]
    (peer,) = rule["from"]
    assert peer["podSelector"]["matchLabels"] == {"pseudoreal.dev/stage": "train"}
    assert peer["namespaceSelector"]["matchExpressions"][0]["values"] == ["a", "b"]
    assert [port["port"] for port in rule["ports"]] == ["reports"]
    nodes = render("--set=networkPolicy.from[0].ipBlock.cidr=10.0.0.0/16")
    (rule,) = find(nodes, "NetworkPolicy")["spec"]["ingress"]
    assert rule["from"][1:] == [{"ipBlock": {"cidr": "10.0.0.0/16"}}], "pods in the network of their node"
    off = render("--set=networkPolicy.enabled=false")
    assert not [document for document in off if document["kind"] == "NetworkPolicy"]


def test_prometheus_objects_are_off_by_default() -> None:
    """The CRDs of the Prometheus operator may be missing."""
    assert not [document for document in render() if document["apiVersion"].startswith("monitoring.coreos.com")]
    assert not [document for document in render() if document["kind"] == "ConfigMap"]


def test_without_its_network_policy_the_operator_is_scraped_without_scrapers() -> None:
    documents = render("--set=metrics.serviceMonitor.enabled=true", "--set=networkPolicy.enabled=false")
    assert find(documents, "ServiceMonitor")


def test_prometheus_monitors_select_operator_and_pods() -> None:
    documents = render(*MONITORED)
    service, monitor = find(documents, "Service", "pseudoreal-metrics"), find(documents, "ServiceMonitor")
    assert LEADER_LABEL not in service["spec"]["selector"], "all operators are read, whoever leads"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert monitor["metadata"]["labels"]["release"] == "prom"
    settings = read_settings({k: v for k, v in environment(documents).items() if "TLS" not in k and "_CA" not in k})
    found = rendered(TRAIN, 1, {"settings": settings})
    pods = find(documents, "PodMonitor", f"{RELEASE}-trainers")["spec"]
    template = found["Job"]["spec"]["template"]
    assert pods["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    names = [port["name"] for port in template["spec"]["containers"][0]["ports"]]
    assert [endpoint["port"] for endpoint in pods["podMetricsEndpoints"]] == names
    known = {re.sub("[^a-z0-9]", "_", label) for label in template["metadata"]["labels"]}
    for relabeling in pods["podMetricsEndpoints"][0]["relabelings"]:
        (label,) = relabeling["sourceLabels"]
        assert label.removeprefix("__meta_kubernetes_pod_label_") in known
    peers = [{"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}]
    assert find(documents, "NetworkPolicy")["spec"]["ingress"][1]["from"] == peers
    assert found["NetworkPolicy"]["spec"]["ingress"][1]["from"] == peers


def test_the_scrape_configuration_of_the_documents_has_the_labels_of_the_monitors() -> None:
    documents = render(*MONITORED, f"--namespace={RELEASE}")
    operators, trainers = documented_scrape_configuration()["scrape_configs"]
    service = find(documents, "Service", "pseudoreal-metrics")
    assert operators["kubernetes_sd_configs"][0]["namespaces"]["names"] == [service["metadata"]["namespace"]]
    (port,) = service["spec"]["ports"]
    assert operators["relabel_configs"][0]["regex"] == f"{service['metadata']['name']};{port['name']}"
    assert operators["honor_labels"] == find(documents, "ServiceMonitor")["spec"]["endpoints"][0]["honorLabels"]
    pods = find(documents, "PodMonitor", f"{RELEASE}-trainers")["spec"]
    (endpoint,), stage = pods["podMetricsEndpoints"], pods["selector"]["matchLabels"]["pseudoreal.dev/stage"]
    assert trainers["relabel_configs"][0]["regex"] == f"{stage};{endpoint['port']}"
    given = {rule["target_label"]: rule["source_labels"] for rule in trainers["relabel_configs"][2:]}
    assert given.keys() >= {"namespace", "pod"}, "which the Prometheus operator adds by itself"
    monitored = {rule["targetLabel"]: rule["sourceLabels"] for rule in endpoint["relabelings"]}
    assert given.items() >= monitored.items()


def test_alert_and_dashboard_objects_equal_their_files() -> None:
    documents = render(*MONITORED)
    rules = yaml.safe_load((chart.CHART / "files/alerts.yaml").read_text())
    assert find(documents, "PrometheusRule")["spec"] == rules
    dashboard = find(documents, "ConfigMap", f"{RELEASE}-dashboard")
    assert dashboard["data"]["pseudoreal.json"] == (chart.CHART / "files/dashboard.json").read_text()
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"


@pytest.mark.parametrize("site", ["https://docs.example/pseudoreal/latest", "https://docs.example/pseudoreal/latest/"])
def test_each_alert_has_the_url_of_its_runbook_if_the_site_has_one(site: str) -> None:
    documents = render(*MONITORED, f"--set=metrics.alerts.runbooks={site}")
    groups = find(documents, "PrometheusRule")["spec"]["groups"]
    urls = {rule["alert"]: rule["annotations"]["runbook_url"] for group in groups for rule in group["rules"]}
    assert len(urls) > 10
    for alert, url in urls.items():
        assert url == f"https://docs.example/pseudoreal/latest/runbooks.html#{alert.lower()}"


NO_IDS = [f"--set=podSecurityContext.{field}=null" for field in ("runAsUser", "runAsGroup", "fsGroup")]
OPENSHIFT = ["--api-versions=security.openshift.io/v1"]
SCC_VOLUMES = {"configMap", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
"""Volume types allowed by the security context constraint restricted-v2."""


@pytest.mark.parametrize("values", [NO_IDS, OPENSHIFT], ids=["null", "OpenShift"])
def test_openshift_admits_all_pods_under_restricted_v2(values: list[str], tmp_path: Path) -> None:
    documents = render(*values)
    write_secret(tmp_path, documents)
    set_here = environment(documents) | {"PSEUDOREAL_REPORT_CA": str(tmp_path / "ca.crt")}
    training = rendered(TRAIN, 1, {"settings": read_settings(set_here)})["Job"]["spec"]["template"]["spec"]
    operator = find(documents, "Deployment")["spec"]["template"]["spec"]
    for pod in (operator, find(documents, "Pod", "pseudoreal-test")["spec"], training):
        assert {*_restricted(pod)} == set()


def test_pods_run_as_a_user_id_unless_the_cluster_assigns_one() -> None:
    assert find(render(), "Deployment")["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == 10001
    assert "runAsUser: a number" in {*_restricted(find(render(), "Deployment")["spec"]["template"]["spec"])}


def _restricted(pod: Json) -> Iterator[str]:
    """Yield the reasons of restricted-v2 for refusing a pod."""
    whole = pod["securityContext"]
    for context in (whole, *(one["securityContext"] for one in pod["containers"])):
        yield from (f"{field}: a number" for field in ("runAsUser", "runAsGroup", "fsGroup") if field in context)
    if (whole["runAsNonRoot"], whole["seccompProfile"]) != (True, {"type": "RuntimeDefault"}):
        yield "securityContext"
    for container in pod["containers"]:
        context = container["securityContext"]
        if context["allowPrivilegeEscalation"] or context["capabilities"] != {"drop": ["ALL"]}:
            yield "privileges"
        if not context["readOnlyRootFilesystem"]:
            yield "files of the image, which belong to another user"
    yield from (kind for volume in pod.get("volumes", []) for kind in volume.keys() - {"name"} - SCC_VOLUMES)
    yield from (field for field in ("hostNetwork", "hostPID", "hostIPC") if pod.get(field))


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        ((), ("operator", "trainer")),
        (IMAGES[:1], ("trainer",)),
        ((IMAGES[1], "--set=operator.image.repository=pseudoreal/operator"), ("operator",)),
    ],
    ids=["none", "the operator's alone", "the default of release 0.3.0, as --reuse-values keeps it"],
)
def test_without_images_the_chart_says_how_to_build_them(values: tuple[str, ...], missing: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError) as refused:
        chart.helm("template", RELEASE, str(chart.CHART), KUBE_VERSION, *values)
    said = str(refused.value)
    assert re.findall(r"(\w+)\.image\.repository is ", said) == [*missing]
    assert re.findall(r"docker build --target (\S+) --tag (\S+) \. && docker push (\S+)", said) == [
        (part, *[f"REGISTRY/pseudoreal-{part}:{semantic(read())}"] * 2) for part in missing
    ]
    (options,) = re.findall(r"helm upgrade --install pseudoreal \.\.\. (.*)", said)
    assert render(*options.replace("REGISTRY", "mine.example").replace("--set ", "--set=").split()), (
        "what it says helps"
    )


def test_an_image_can_be_given_by_digest() -> None:
    digest = f"sha256:{'a' * 64}"
    documents = render(*(f"--set={part}.image.digest={digest}" for part in ("operator", "trainer")))
    assert container(documents)["image"] == f"registry.example/operator@{digest}"
    assert environment(documents)["PSEUDOREAL_TRAINER_IMAGE"] == f"registry.example/trainer@{digest}"
    (test,) = find(documents, "Pod", "pseudoreal-test")["spec"]["containers"]
    assert test["image"] == f"registry.example/operator@{digest}"


def test_cert_manager_can_issue_the_certificate() -> None:
    wanted = ["--set=reports.certManager.issuerRef.name=internal-ca"]
    documents = render(*wanted)
    assert not [document for document in documents if document["kind"] == "Secret"]
    certificate = find(documents, "Certificate")["spec"]
    assert certificate["dnsNames"] == [HOST]
    assert certificate["issuerRef"] == {"name": "internal-ca", "kind": "Issuer", "group": "cert-manager.io"}
    volumes = find(documents, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert {"name": "tls", "secret": {"secretName": certificate["secretName"]}} in volumes
    assert certificate["secretName"] != "pseudoreal-tls", "Helm deletes that one when cert-manager takes over"
    assert render(*wanted) == documents, "nothing is random in it"


THINGS = ["serviceAccounts", "hostPath", "privileged", "rootUser", "hostNetwork"]


@pytest.mark.minors
@pytest.mark.parametrize("thing", THINGS)
def test_the_policy_admits_allowed_jobs(thing: str) -> None:
    name = f"admissionPolicy.allow.{thing}"
    by_default, refusing, allowing = (
        render(*value) for value in ((), (f"--set={name}=false",), (f"--set={name}=true",))
    )
    for part in ("pods", "child-pods"):

        def messages(documents: list[Json], policy: str = f"{WIDE}-{part}") -> str:
            return str(find(documents, "ValidatingAdmissionPolicy", policy)["spec"]["validations"])

        assert name in messages(by_default)
        assert name in messages(refusing)
        assert name not in messages(allowing)


@pytest.mark.minors
def test_the_api_server_takes_the_policies_that_allow_all(kubectl: Kubectl) -> None:
    documents = render(*(f"--set=admissionPolicy.allow.{thing}=true" for thing in THINGS))
    items = [document for document in documents if document["kind"].startswith("ValidatingAdmission")]
    said = kubectl.said(
        "apply", "--dry-run=server", "-f", "-", body={"apiVersion": "v1", "kind": "List", "items": items}
    )
    assert len(said.splitlines()) == 8


def test_two_releases_in_different_namespaces_share_only_the_crd_and_its_policy() -> None:
    def made(namespace: str) -> set[tuple[str, str, str]]:
        values = ("--set=watchNamespaces={team}", *MONITORED)
        where = (f"--namespace={namespace}", KUBE_VERSION)
        text = chart.helm("template", RELEASE, str(chart.CHART), *where, *IMAGES, *values)
        metadata = [(d["kind"], d["metadata"]) for d in yaml.safe_load_all(text) if d]
        return {(kind, one.get("namespace", ""), one["name"]) for kind, one in metadata}

    shared = made("blue") & made("green")
    kinds = {"CustomResourceDefinition", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    assert shared == {(kind, "", "pseudorealjobs.pseudoreal.dev") for kind in kinds}
    # A dash would make one name of namespace a-b with release c and of namespace a with release b-c.
    assert ("ClusterRole", "", f"blue.{RELEASE}-reviews") in made("blue")


def test_a_name_override_applies_to_all_objects() -> None:
    documents = render("--set=fullnameOverride=trainers")
    named = {d["metadata"]["name"] for d in documents} - {"pseudorealjobs.pseudoreal.dev"}
    assert {name.removeprefix("operators.").split("-")[0] for name in named} == {"trainers"}
    (operator,) = find(documents, "Deployment", "trainers")["spec"]["template"]["spec"]["containers"]
    given = {entry["name"]: entry.get("value", "") for entry in operator["env"]}
    assert given["PSEUDOREAL_LEASE"] == "operators/trainers"
    assert given[REPORT_URL].startswith("https://trainers.operators.svc:")


def test_pods_get_the_labels_variables_and_node_selector_of_the_values() -> None:
    values = ("podLabels.team=blue", "podLabels.app\\.kubernetes\\.io/component=mine", "nodeSelector.pool=infra")
    proxy = ("extraEnv[0].name=HTTPS_PROXY", "extraEnv[0].value=http://proxy:3128")
    documents = render(*(f"--set=operator.{value}" for value in (*values, *proxy)))
    pod = find(documents, "Deployment")["spec"]["template"]
    assert pod["metadata"]["labels"]["team"] == "blue"
    selector = find(documents, "Deployment")["spec"]["selector"]["matchLabels"]
    assert selector.items() <= pod["metadata"]["labels"].items(), "the chart's own stay"
    assert environment(documents)["HTTPS_PROXY"] == "http://proxy:3128"
    assert pod["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux", "pool": "infra"}
    for spec in (
        find(render(), "Deployment")["spec"]["template"]["spec"],
        find(render(), "Pod", "pseudoreal-test")["spec"],
    ):
        assert spec["nodeSelector"] == {"kubernetes.io/os": "linux"}


@pytest.fixture
def release(control_plane: ControlPlane, cluster: Cluster) -> Iterator[Callable[..., None]]:
    """Function for installing or upgrading a release, uninstalled after the test. Its pods do not run."""
    where = [f"--kubeconfig={control_plane.kubeconfig}", f"--namespace={cluster.namespace}"]

    def upgrade(*values: str) -> None:
        given = ("--set=crds.install=false", *IMAGES, *values)
        chart.helm("upgrade", "--install", RELEASE, str(chart.CHART), *where, *given)

    yield upgrade
    chart.helm("uninstall", RELEASE, "--no-hooks", *where)


@pytest.mark.minors
def test_an_upgrade_keeps_the_certificate(release: Callable[..., None], cluster: Cluster) -> None:
    core = client.CoreV1Api(cluster.api)

    def installed() -> Json:
        return dict(core.read_namespaced_secret("pseudoreal-tls", cluster.namespace).data or {})

    release()
    before = installed()
    release("--set=operator.priorityClassName=high")
    assert installed() == before
    core.delete_namespaced_secret("pseudoreal-tls", cluster.namespace)
    release()
    assert installed() != before


def _begin(certificate: Any) -> float:
    return ssl.cert_time_to_seconds(str(certificate["notBefore"]))


def _served(folder: Path) -> socket.socket:
    """Return a connection to a TLS server with the certificate in a folder."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    listening = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with listening, listening.accept()[0] as connection, serving.wrap_socket(connection, server_side=True) as tls:
            tls.recv(1)

    threading.Thread(target=accept, daemon=True).start()
    return socket.create_connection(listening.getsockname())
