"""Volumes of the local cluster: folders of this machine, because the cluster has no provisioner."""

import shutil
from pathlib import Path

from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.demo.target import NAMESPACE
from pseudoreal_dev.machine import paths


def create_host_volume(kubernetes: Kubernetes, claim: str, storage: str) -> Path:
    """Create a PersistentVolume for a claim, on an empty folder of this machine."""
    folder = paths.cache() / "volumes" / claim
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    kubernetes.run("delete", "persistentvolume", claim, "--ignore-not-found")
    spec = {
        "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
        "capacity": {"storage": storage},
        "hostPath": {"path": str(folder), "type": "Directory"},
        "claimRef": {"namespace": NAMESPACE, "name": claim},
        "persistentVolumeReclaimPolicy": "Retain",
    }
    kubernetes.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": claim}, "spec": spec})
    return folder
