"""A provisioner of volumes that does as local-path of Rancher, the default of kind and k3s: it makes a folder of one
node for each claim, and no volume for several nodes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from kubernetes import client, watch

NAME = "rancher.io/local-path"
_PROVISIONER = "volume.kubernetes.io/storage-provisioner"
_NODE = "volume.kubernetes.io/selected-node"
_MODES = {"ReadWriteOnce", "ReadWriteOncePod"}
REFUSAL = "NodePath only supports ReadWriteOnce and ReadWriteOncePod (1.22+) access modes"


@contextmanager
def local_path(api: client.ApiClient, namespace: str, storage_class: str, *, waits: bool) -> Iterator[None]:
    """Run the provisioner for the claims of a namespace, with a class of its own. `waits`: a volume is made once a pod
    has a node, as on kind and k3s; else at once."""
    storage, mode = client.StorageV1Api(api), "WaitForFirstConsumer" if waits else "Immediate"
    body: Any = {"metadata": {"name": storage_class}, "provisioner": NAME, "volumeBindingMode": mode}
    storage.create_storage_class(body)
    ended = threading.Event()
    thread = threading.Thread(target=_serve, args=(client.CoreV1Api(api), namespace, ended))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        storage.delete_storage_class(storage_class)


def _serve(core: client.CoreV1Api, namespace: str, ended: threading.Event) -> None:
    served: set[str] = set()
    while not ended.is_set():
        changes = watch.Watch().stream(core.list_namespaced_persistent_volume_claim, namespace, timeout_seconds=1)
        for change in changes:
            claim: Any = change["object"]
            annotations = claim.metadata.annotations or {}
            if claim.status.phase != "Pending" or annotations.get(_PROVISIONER) != NAME or claim.metadata.uid in served:
                continue
            served.add(claim.metadata.uid)
            if {*claim.spec.access_modes} <= _MODES:
                _make_volume(core, claim, annotations.get(_NODE))
            else:
                _refuse(core, claim)


def _make_volume(core: client.CoreV1Api, claim: Any, node: str | None) -> None:
    hostname = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    spec = {
        "accessModes": claim.spec.access_modes,
        "capacity": claim.spec.resources.requests,
        "storageClassName": claim.spec.storage_class_name,
        "hostPath": {"path": "/nowhere"},
        "claimRef": {"kind": "PersistentVolumeClaim", "apiVersion": "v1"}
        | {"namespace": claim.metadata.namespace, "name": claim.metadata.name, "uid": claim.metadata.uid},
        **({"nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [hostname]}]}}} if node else {}),
    }
    volume: Any = {"metadata": {"name": f"pvc-{claim.metadata.uid}"}, "spec": spec}
    core.create_persistent_volume(volume)


def _refuse(core: client.CoreV1Api, claim: Any) -> None:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    about = {"kind": "PersistentVolumeClaim", "apiVersion": "v1", "uid": claim.metadata.uid}
    event: Any = {
        "metadata": {"generateName": f"{claim.metadata.name}."},
        "involvedObject": about | {"namespace": claim.metadata.namespace, "name": claim.metadata.name},
        "type": "Warning",
        "reason": "ProvisioningFailed",
        "message": f'failed to provision volume with StorageClass "{claim.spec.storage_class_name}": {REFUSAL}',
        "source": {"component": NAME},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
    core.create_namespaced_event(claim.metadata.namespace, event)
