"""Copies files from PersistentVolumeClaims to this machine, through a pod that mounts the claims."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.demo.target import NAMESPACE

_POD = "pseudoreal-files"
_MOST_SECONDS = 600


def copied(kubernetes: Kubernetes, image: str, claims: Mapping[str, str], wanted: Sequence[str], folder: Path) -> None:
    """Copy the files and folders in `wanted` into a new `folder`, each under its last path component.

    `claims` maps the first component of a path in `wanted` to the name of a claim.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with _pod(kubernetes, image, claims):
        for path in wanted:
            kubernetes.run("cp", f"{NAMESPACE}/{_POD}:/{path}", str(folder / Path(path).name))


@contextmanager
def _pod(kubernetes: Kubernetes, image: str, claims: Mapping[str, str]) -> Iterator[None]:
    """Run a pod with the claims mounted read-only at /NAME. `image` must contain tar, for `kubectl cp`."""
    here = f"--namespace={NAMESPACE}"
    mounts = [{"name": name, "mountPath": f"/{name}", "readOnly": True} for name in claims]
    volumes = [{"name": name, "persistentVolumeClaim": {"claimName": claim}} for name, claim in claims.items()]
    container = {
        "name": "files",
        "image": image,
        "command": ["sleep", str(_MOST_SECONDS)],
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": volumes,
    }
    kubernetes.run("delete", "pod", _POD, here, "--ignore-not-found", "--now")
    metadata = {"name": _POD, "namespace": NAMESPACE}
    kubernetes.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    try:
        kubernetes.run("wait", "--for=condition=Ready", f"pod/{_POD}", here, "--timeout=5m")
        yield
    finally:
        kubernetes.run("delete", "pod", _POD, here, "--ignore-not-found", "--now")
