"""The pod template of a stage."""

from dataclasses import dataclass
from typing import Any

from pseudoreal_api.names import (
    CONFIG_DIRECTORY,
    CONFIG_FILE,
    CONTAINER,
    OFFLOAD_DIRECTORY,
    RENDEZVOUS_PORT,
    WORK_DIRECTORY,
    claim_name,
)
from pseudoreal_api.phase_spec import Resources
from pseudoreal_api.run_spec import Checkpoint
from pseudoreal_api.spec import PseudoRealJob

from pseudoreal_operator.manifests.overlay import merge
from pseudoreal_operator.reading import COMPLETION_INDEX
from pseudoreal_operator.settings import Settings

Json = dict[str, Any]

USER = 10001
GRACE_SECONDS = 120
"""For the checkpoint that a trainer saves when it is asked to stop."""
TERMINATION_LOG = "/dev/termination-log"


@dataclass(frozen=True)
class PodPlan:
    """What differs between the stages.

    `rendezvous_id` is None for a delink: it is one process. `disk` is the volume source for offloaded state, or None
    where no state can be on disk.
    """

    name: str
    labels: dict[str, str]
    resources: Resources
    workers: int = 1
    processes: int = 1
    rendezvous_id: str | None = None
    disk: Json | None = None


def pod_template(job: PseudoRealJob, plan: PodPlan, settings: Settings) -> Json:
    spec = job.spec
    base: Json = {
        "metadata": {"labels": plan.labels},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": _pod_security(),
            "containers": [_container(job, plan, settings)],
            "volumes": _volumes(job, plan),
        },
    }
    if plan.rendezvous_id:
        base["spec"]["subdomain"] = plan.name
    if spec.scheduling.priority_class_name:
        base["spec"]["priorityClassName"] = spec.scheduling.priority_class_name
    merged: Json = merge(base, spec.pod.template)
    return merged


def _container(job: PseudoRealJob, plan: PodPlan, settings: Settings) -> Json:
    return {
        "name": CONTAINER,
        "image": job.spec.pod.image or settings.trainer_image,
        "imagePullPolicy": settings.pull_policy,
        "command": ["python", "-m", "pseudoreal_trainer.pod", f"{CONFIG_DIRECTORY}/{CONFIG_FILE}"],
        "env": _environment(job, plan),
        "resources": plan.resources.to_dict(),
        "volumeMounts": _mounts(job, plan),
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def _environment(job: PseudoRealJob, plan: PodPlan) -> list[Json]:
    values = {
        "HOME": "/tmp",
        "PYTHONUNBUFFERED": "1",
        "OMP_WAIT_POLICY": "passive",
        "PSEUDOREAL_TERMINATION_LOG": TERMINATION_LOG,
    }
    if any(name.endswith("/gpu") for name in plan.resources.limits):
        values["NCCL_DEBUG"] = "WARN"
    if job.spec.network.interface:
        values |= dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), job.spec.network.interface)
    fixed: list[Json] = [{"name": name, "value": value} for name, value in values.items()]
    chosen: list[Json] = [{"name": variable.name, "value": variable.value} for variable in job.spec.pod.env]
    merged: list[Json] = merge(fixed + _rendezvous(plan), chosen)
    return merged


def _rendezvous(plan: PodPlan) -> list[Json]:
    """torchrun reads its options from PET_*. The id has the attempt in it, so that a stale worker cannot join."""
    if plan.rendezvous_id is None:
        return []
    values = {
        "PET_NNODES": str(plan.workers),
        "PET_NPROC_PER_NODE": str(plan.processes),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{plan.name}-0.{plan.name}:{RENDEZVOUS_PORT}",
        "PET_RDZV_ID": plan.rendezvous_id,
        "PET_MAX_RESTARTS": "0",
        # torchrun kills its ranks this long after a SIGTERM: late enough for a checkpoint, before the kubelet kills it.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE_SECONDS - 20),
    }
    index = {"fieldRef": {"fieldPath": f"metadata.annotations['{COMPLETION_INDEX}']"}}
    fixed: list[Json] = [{"name": name, "value": value} for name, value in values.items()]
    return [*fixed, {"name": "PET_NODE_RANK", "valueFrom": index}]


def _volumes(job: PseudoRealJob, plan: PodPlan) -> list[Json]:
    spec = job.spec
    volumes: list[Json] = [
        {"name": "config", "configMap": {"name": plan.name}},
        _work_volume(job),
        {"name": "tmp", "emptyDir": {}},
    ]
    if spec.data.volume:
        volumes.append({"name": "data", **spec.data.volume})
    if spec.network.shared_memory is not None:
        size = str(spec.network.shared_memory)
        volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": size}})
    if plan.disk is not None:
        volumes.append({"name": "offload", **plan.disk})
    return volumes


def _mounts(job: PseudoRealJob, plan: PodPlan) -> list[Json]:
    spec = job.spec
    mounts: list[Json] = [
        {"name": "config", "mountPath": CONFIG_DIRECTORY, "readOnly": True},
        _work_mount(spec.checkpoint),
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if spec.data.volume:
        mounts.append({"name": "data", "mountPath": spec.data.path, "readOnly": True})
    if spec.network.shared_memory is not None:
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    if plan.disk is not None:
        mounts.append({"name": "offload", "mountPath": OFFLOAD_DIRECTORY})
    return mounts


def _work_volume(job: PseudoRealJob) -> Json:
    """Checkpoints in object storage leave only metrics.jsonl to the pod."""
    volume = job.spec.checkpoint.volume
    if volume is None:
        return {"name": "work", "emptyDir": {}}
    claim = volume.claim_name or claim_name(job.metadata.name)
    return {"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim}}


def _work_mount(checkpoint: Checkpoint) -> Json:
    if checkpoint.volume is None:
        return {"name": "work", "mountPath": WORK_DIRECTORY}
    return {"name": "checkpoints", "mountPath": checkpoint.path}


def _pod_security() -> Json:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        # Walking a volume of checkpoints to change owners that are right already takes minutes.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
