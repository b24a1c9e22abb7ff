"""examples/quickstart.yaml on a cluster."""

import shutil
from typing import Any

import yaml
from pseudoreal_api.names import LABEL_JOB

from . import paths
from .kubectl import Kubernetes
from .progress import progress

FILE = paths.REPOSITORY / "examples" / "quickstart.yaml"
JOB = "quickstart"
NAMESPACE = "default"


def apply(kubernetes: Kubernetes, *, on_host_volume: bool) -> None:
    """Applies the example afresh: what an earlier run left of it is deleted first."""
    with progress.step(f"removing what an earlier {JOB} left"):
        kubernetes.run("delete", "-f", str(FILE), f"--namespace={NAMESPACE}", "--ignore-not-found", "--timeout=120s")
        kubernetes.run(
            "wait",
            "--for=delete",
            "pods",
            f"--selector={LABEL_JOB}={JOB}",
            f"--namespace={NAMESPACE}",
            "--timeout=120s",
        )
    with progress.step(f"kubectl apply -f {FILE.relative_to(paths.REPOSITORY)}"):
        if on_host_volume:
            _create_host_volume(kubernetes)
        kubernetes.run("apply", "-f", str(FILE), f"--namespace={NAMESPACE}")


def _create_host_volume(kubernetes: Kubernetes) -> None:
    """A folder of this machine for the example's claim: the local cluster has no provisioner of volumes."""
    claim = next(d for d in _documents() if d["kind"] == "PersistentVolumeClaim")
    name = str(claim["metadata"]["name"])
    folder = paths.cache() / "volumes" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    kubernetes.run("delete", "persistentvolume", name, "--ignore-not-found")
    spec = {
        "accessModes": claim["spec"]["accessModes"],
        "capacity": claim["spec"]["resources"]["requests"],
        "hostPath": {"path": str(folder), "type": "Directory"},
        "claimRef": {"namespace": NAMESPACE, "name": name},
        "persistentVolumeReclaimPolicy": "Retain",
    }
    kubernetes.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec})


def _documents() -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(FILE.read_text()) if document]
