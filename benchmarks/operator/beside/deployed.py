"""Run a controller of another project as a process beside an API server, with its webhooks, as its manifests would.

The controller creates the certificates of its webhooks in a Secret, and waits until a kubelet has mounted them at a
built-in path. There is no kubelet here: the files are written into a folder that only the process sees at that path.
The API server calls a webhook through its Service, which has this machine as external name.
"""

import base64
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client
from pseudoreal_dev.cluster.control_plane import ControlPlane
from pseudoreal_dev.neighbours.kubeflow import Controller

from tests.support.kubectl import Kubectl
from tests.support.patience import wait_for
from tests.support.ports import free_port

Json = dict[str, Any]

_MOUNT = "/tmp/k8s-webhook-server"
_CERTIFICATES = "serving-certs"


@dataclass(frozen=True)
class Deployment:
    """Deployment of a controller; the names are built into the program."""

    name: str
    """User name for the controller's requests."""
    namespace: str
    service: str
    secret: str
    webhooks: Mapping[str, str]
    """Kind of a webhook configuration -> its name."""
    options: Callable[[Path, int, int], Sequence[str]]
    """Options of the program, given a folder for files, the port of its webhooks and the port of its health
    endpoint."""
    selectors: Mapping[str, Json] = field(default_factory=dict)
    """Name of a webhook -> selector of its objects, if the manifests add the selector by a patch."""


@contextmanager
def running(
    deployment: Deployment, controller: Controller, control_plane: ControlPlane, admin: client.ApiClient, folder: Path
) -> Iterator[int]:
    """Yield the id of the process once it is ready."""
    port, health, kubectl = free_port(), free_port(), Kubectl(control_plane.kubeconfig)
    (folder / _CERTIFICATES).mkdir(parents=True)
    _define(controller.definitions, kubectl)
    _prepare(deployment, controller, kubectl, folder, port)
    options = deployment.options(folder, port, health)
    with _process(deployment, controller.program, options, control_plane, folder) as process:

        def log() -> str:
            return (folder / "log").read_text()[-4000:]

        wait_for("certificates", lambda: _mount(deployment, admin, folder) or process.poll() is not None, log)
        wait_for(deployment.name, lambda: process.poll() is not None or _is_ready(health), log)
        # A program may be ready before it serves its webhooks; the API server would refuse jobs.
        found = [hook for body in webhooks(deployment, controller.webhooks, port) for hook in body["webhooks"]]
        paths = [hook["clientConfig"]["service"]["path"] for hook in found]
        trusted = ssl.create_default_context(cafile=folder / _CERTIFICATES / "ca.crt")
        trusted.check_hostname = False  # the certificate names the Service
        wait_for("webhooks", lambda: process.poll() is not None or all(_serves(port, p, trusted) for p in paths), log)
        assert process.poll() is None, log()
        yield process.pid
        assert process.poll() is None, log()


def _define(definitions: Sequence[Path], kubectl: Kubectl) -> None:
    for definition in definitions:
        kubectl.said("apply", "--server-side", "-f", str(definition))
    names = [yaml.safe_load(definition.read_text())["metadata"]["name"] for definition in definitions]
    wait_for("the definitions", lambda: all(kubectl("get", name).returncode == 0 for name in names))


def _prepare(deployment: Deployment, controller: Controller, kubectl: Kubectl, folder: Path, port: int) -> None:
    place = {"namespace": deployment.namespace}
    service = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]}
    objects: list[Json] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": deployment.namespace}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": place | {"name": deployment.secret}},
        {"apiVersion": "v1", "kind": "Service", "metadata": place | {"name": deployment.service}, "spec": service},
        *webhooks(deployment, controller.webhooks, port),
    ]
    (folder / "objects.yaml").write_text(yaml.safe_dump_all(objects))
    kubectl.said("apply", "-f", str(folder / "objects.yaml"))


def webhooks(deployment: Deployment, file: Path, port: int) -> Iterator[Json]:
    """Yield the webhooks of a file as kustomize would render them."""
    for body in filter(None, yaml.safe_load_all(file.read_text())):
        for hook in body["webhooks"]:
            path = hook["clientConfig"]["service"]["path"]
            service = {"namespace": deployment.namespace, "name": deployment.service, "path": path, "port": port}
            hook["clientConfig"] = {"service": service}
            if hook["name"] in deployment.selectors:
                hook["objectSelector"] = deployment.selectors[hook["name"]]
        yield body | {"metadata": {"name": deployment.webhooks[body["kind"]]}}


@contextmanager
def _process(
    deployment: Deployment, program: Path, options: Sequence[str], control_plane: ControlPlane, folder: Path
) -> Iterator["subprocess.Popen[bytes]"]:
    _, kubeconfig = control_plane.user(deployment.name, ["system:masters"])
    place = f"mkdir -p {_MOUNT} && mount --bind $0 {_MOUNT}"
    private = ["unshare", "--map-root-user", "--mount", "sh", "-c", f'{place} && exec "$@"', folder]
    command = [*private, program, f"--kubeconfig={kubeconfig}", *options]
    with (folder / "log").open("wb") as log:
        words = ["setpriv", "--pdeathsig", "KILL", *map(str, command)]
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _mount(deployment: Deployment, admin: client.ApiClient, folder: Path) -> bool:
    """Write the content of the Secret into the folder, like a kubelet; return whether the Secret had content."""
    secret: Any = client.CoreV1Api(admin).read_namespaced_secret(deployment.secret, deployment.namespace)
    for name, text in (secret.data or {}).items():
        (folder / _CERTIFICATES / name).write_bytes(base64.b64decode(text))
    return bool(secret.data)


def _serves(port: int, path: str, trusted: ssl.SSLContext) -> bool:
    """Return whether there is a webhook at the path; it may refuse the empty request."""
    request = urllib.request.Request(f"https://127.0.0.1:{port}{path}", data=b"{}", method="POST")
    try:
        urllib.request.urlopen(request, timeout=5, context=trusted).close()
    except urllib.error.HTTPError as error:
        return error.code != HTTPStatus.NOT_FOUND
    except OSError:
        return False
    return True


def _is_ready(port: int) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
        return bool(answer.status == 200)
    return False
