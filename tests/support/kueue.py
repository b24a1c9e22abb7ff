"""A real Kueue controller beside an API server, and its configuration objects."""

import base64
import json
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client
from pseudoreal_api import base
from pseudoreal_dev.cluster.certificates import Authority
from pseudoreal_dev.cluster.control_plane import ControlPlane
from pseudoreal_dev.neighbours import kueue

from tests.support.kubectl import Kubectl
from tests.support.patience import wait_for
from tests.support.ports import free_port

Json = dict[str, Any]

GROUP, VERSION = "kueue.x-k8s.io", "v1beta2"
MANAGER = "kueue"
"""Field manager name of Kueue in `managedFields`."""
_WEBHOOKS = ("job", "clusterqueue", "resourceflavor", "workload", "cohort")
"""Kinds with installed webhooks. Webhooks of other kinds would block requests unrelated to these tests."""


@dataclass(frozen=True)
class Kueue:
    """Configuration of Kueue by an administrator. Each queue is for one namespace, and named after it."""

    api: client.ApiClient

    def flavor(self, name: str, labels: dict[str, str], *, taint: Json | None = None, topology: str = "") -> None:
        """Create a flavor for nodes with these labels; `topology` is the name of their topology."""
        tolerations = [{key: taint[key] for key in ("key", "value", "effect")} | {"operator": "Equal"}] if taint else []
        spec = {"nodeLabels": labels, "nodeTaints": [taint] if taint else [], "tolerations": tolerations}
        spec |= {"topologyName": topology} if topology else {}
        self.create("resourceflavors", {"kind": "ResourceFlavor", "metadata": {"name": name}, "spec": spec})

    def topology(self, name: str, *labels: str) -> None:
        """Create a topology with levels given by node labels, from widest to narrowest."""
        spec = {"levels": [{"nodeLabel": label} for label in labels]}
        self.create("topologies", {"kind": "Topology", "metadata": {"name": name}, "spec": spec})

    def priority(self, name: str, value: int) -> None:
        body = {"kind": "WorkloadPriorityClass", "metadata": {"name": name}, "value": value}
        self.create("workloadpriorityclasses", body)

    def cluster_queue(self, name: str, flavor: str, resource: str, quota: int, **fields: Any) -> None:
        resources = [{"name": resource, "nominalQuota": quota}]
        group = {"coveredResources": [resource], "flavors": [{"name": flavor, "resources": resources}]}
        spec = {"namespaceSelector": {}, "resourceGroups": [group]} | fields
        self.create("clusterqueues", {"kind": "ClusterQueue", "metadata": {"name": name}, "spec": spec})

    def set_quota(self, cluster_queue: str, quota: int) -> None:
        body: Any = self._custom.get_cluster_custom_object(GROUP, VERSION, "clusterqueues", cluster_queue)
        body["spec"]["resourceGroups"][0]["flavors"][0]["resources"][0]["nominalQuota"] = quota
        self._custom.patch_cluster_custom_object(GROUP, VERSION, "clusterqueues", cluster_queue, {"spec": body["spec"]})

    def stop(self, cluster_queue: str, policy: str) -> None:
        """Set the queue's stopPolicy: None, Hold or HoldAndDrain."""
        patch = {"spec": {"stopPolicy": policy}}
        self._custom.patch_cluster_custom_object(GROUP, VERSION, "clusterqueues", cluster_queue, patch)

    def local_queue(self, namespace: str, name: str, cluster_queue: str) -> None:
        body = {"kind": "LocalQueue", "metadata": {"name": name}, "spec": {"clusterQueue": cluster_queue}}
        made = {"apiVersion": f"{GROUP}/{VERSION}"} | body
        self._custom.create_namespaced_custom_object(GROUP, VERSION, namespace, "localqueues", made)

    def create(self, plural: str, body: Json) -> None:
        made = {"apiVersion": f"{GROUP}/{VERSION}"} | body
        self._custom.create_cluster_custom_object(GROUP, VERSION, plural, made)

    @property
    def _custom(self) -> client.CustomObjectsApi:
        return client.CustomObjectsApi(self.api)


@contextmanager
def running(control_plane: ControlPlane, admin: client.ApiClient, folder: Path) -> Iterator[Kueue]:
    """Run Kueue for all namespaces; its webhooks are removed at the end."""
    built, kubectl = kueue.kueue(), Kubectl(control_plane.kubeconfig)
    kubectl.said("apply", "--server-side", "-f", str(built.definitions))
    wait_for("the definitions", lambda: all(kubectl("get", kind).returncode == 0 for kind in _kinds(built.definitions)))
    authority, port, health = Authority(folder / "pki"), free_port(), free_port()
    certificates = _certificates(authority, folder / "certificates")
    (folder / "config.yaml").write_text(yaml.safe_dump(_config(port, health, certificates)))
    with _process(control_plane, folder, certificates) as process:
        wait_for("Kueue", lambda: process.poll() is not None or _is_ready(health), (folder / "log").read_text)
        assert process.poll() is None, (folder / "log").read_text()
        hooks = folder / "webhooks.yaml"
        hooks.write_text(yaml.safe_dump_all(_webhooks(built.webhooks, port, authority)))
        kubectl.said("apply", "-f", str(hooks))
        yield Kueue(admin)
        # Before Kueue ends: with webhooks and without Kueue, no Job can be created.
        kubectl.said("delete", "-f", str(hooks))


def _kinds(definitions: Path) -> list[str]:
    """Return the names of the kinds for kubectl."""
    return [yaml.safe_load(path.read_text())["metadata"]["name"] for path in sorted(definitions.iterdir())]


def _config(port: int, health: int, certificates: Path) -> Json:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": port, "certDir": str(certificates)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "clientConnection": {"qps": 500, "burst": 500},
        "integrations": {"frameworks": ["batch/job"]},
        "multiKueue": {"externalFrameworks": [{"name": f"{base.KIND}.{base.VERSION}.{base.GROUP}"}]},
        # Memory and processors are unlimited here.
        "resources": {"excludeResourcePrefixes": ["cpu", "memory", "ephemeral-storage"]},
    }


@contextmanager
def _process(control_plane: ControlPlane, folder: Path, certificates: Path) -> Iterator["subprocess.Popen[bytes]"]:
    _, kubeconfig = control_plane.user(MANAGER, ["system:masters"])
    options = [f"--config={folder / 'config.yaml'}", f"--kubeconfig={kubeconfig}"]
    command = [kueue.kueue().program, *options, "--feature-gates=VisibilityOnDemand=false"]
    # Kueue reads the certificate of its metrics from a fixed path below /etc, even if it serves no metrics: mount an
    # /etc for this process alone, with nothing but the certificates.
    place = "mount -t tmpfs none /etc && mkdir -p /etc/kueue/metrics && cp -r $0 /etc/kueue/metrics/certs"
    private = ["unshare", "--map-root-user", "--mount", "sh", "-c", f'{place} && exec "$@"', certificates]
    with (folder / "log").open("wb") as log:
        words = ["setpriv", "--pdeathsig", "KILL", *map(str, [*private, *command])]
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _certificates(authority: Authority, folder: Path) -> Path:
    pair = authority.issue("webhooks", hosts=["127.0.0.1"])
    folder.mkdir()
    (folder / "tls.crt").write_bytes(pair.certificate.read_bytes())
    (folder / "tls.key").write_bytes(pair.key.read_bytes())
    return folder


def _is_ready(port: int) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def _webhooks(file: Path, port: int, authority: Authority) -> list[Json]:
    """Return Kueue's webhook configurations, changed to call it by address instead of by Service."""
    bundle, found = base64.b64encode(authority.certificate.read_bytes()).decode(), []
    for body in yaml.safe_load_all(file.read_text()):
        hooks = [hook for hook in body["webhooks"] if hook["name"].removesuffix(".kb.io")[1:] in _WEBHOOKS]
        for hook in hooks:
            path = hook["clientConfig"]["service"]["path"]
            hook["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": bundle}
        body["metadata"] = {"name": f"kueue-{body['metadata']['name']}"}
        found.append(body | {"webhooks": hooks})
    assert all(body["webhooks"] for body in found), json.dumps(found)
    return found
