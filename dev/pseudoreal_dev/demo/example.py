"""examples/quickstart.yaml on a cluster."""

import shutil
from pathlib import Path
from typing import Any

import yaml
from pseudoreal_api.names import LABEL_JOB

from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.machine import paths
from pseudoreal_dev.machine.progress import progress

FILE = paths.REPOSITORY / "examples" / "quickstart.yaml"
JOB = "quickstart"
NAMESPACE = "default"


def apply(kubernetes: Kubernetes, *, on_host_volume: bool) -> None:
    """Applies the example afresh: what an earlier run left of it is deleted first."""
    with progress.step(f"removing what an earlier {JOB} left"):
        kubernetes.run("delete", "-f", str(FILE), f"--namespace={NAMESPACE}", "--ignore-not-found", "--timeout=10m")
        kubernetes.run(
            "wait",
            "--for=delete",
            "pods",
            f"--selector={LABEL_JOB}={JOB}",
            f"--namespace={NAMESPACE}",
            "--timeout=10m",
        )
    with progress.step(f"kubectl apply -f {FILE.relative_to(paths.REPOSITORY)}"):
        if on_host_volume:
            claim = _claim()
            storage = claim["spec"]["resources"]["requests"]["storage"]
            create_host_volume(kubernetes, claim["metadata"]["name"], storage)
        kubernetes.run("apply", "-f", str(FILE), f"--namespace={NAMESPACE}")


def create_host_volume(kubernetes: Kubernetes, claim: str, storage: str) -> Path:
    """An empty folder of this machine for a claim: the local cluster has no provisioner of volumes."""
    folder = paths.cache() / "volumes" / claim
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    kubernetes.run("delete", "persistentvolume", claim, "--ignore-not-found")
    spec = {
        "accessModes": ["ReadWriteMany"],
        "capacity": {"storage": storage},
        "hostPath": {"path": str(folder), "type": "Directory"},
        "claimRef": {"namespace": NAMESPACE, "name": claim},
        "persistentVolumeReclaimPolicy": "Retain",
    }
    kubernetes.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": claim}, "spec": spec})
    return folder


def _claim() -> dict[str, Any]:
    documents = yaml.safe_load_all(FILE.read_text())
    return next(document for document in documents if document["kind"] == "PersistentVolumeClaim")
