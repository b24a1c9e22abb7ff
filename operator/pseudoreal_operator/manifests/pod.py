"""The pod template of a stage."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from pseudoreal_api.names import (
    CONFIG_DIRECTORY,
    CONFIG_FILE,
    CONTAINER,
    OFFLOAD_DIRECTORY,
    RENDEZVOUS_PORT,
    WORK_DIRECTORY,
    claim_name,
    network_name,
)
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_api.spec.network import Network
from pseudoreal_api.spec.phase import Resources
from pseudoreal_api.spec.run import Checkpoint, is_reserved
from pseudoreal_api.wire.reports import NODE_NAME

from pseudoreal_operator.manifests import files, network, reporting
from pseudoreal_operator.manifests.overlay import merge, without_nulls
from pseudoreal_operator.manifests.placement import place
from pseudoreal_operator.observe.reading import COMPLETION_INDEX
from pseudoreal_operator.settings import Settings

Json = dict[str, Any]

TERMINATION_LOG = "/dev/termination-log"


@dataclass(frozen=True)
class PodPlan:
    """What differs between the stages.

    `files` are those in CONFIG_DIRECTORY, by name. `rendezvous_id` is None for a delink: it is one process, and its
    network is the default one. `disk` is the volume source for offloaded state, or None where no state can be on disk.
    """

    name: str
    labels: dict[str, str]
    files: dict[str, str]
    resources: Resources
    workers: int = 1
    processes: int = 1
    rendezvous_id: str | None = None
    rendezvous_port: int = RENDEZVOUS_PORT
    network: Network = field(default_factory=Network)
    disk: Json | None = None

    @property
    def trains(self) -> bool:
        return self.rendezvous_id is not None


def pod_template(job: PseudoRealJob, plan: PodPlan, settings: Settings, avoid: Sequence[str] = ()) -> Json:
    """The operator's template, the user's over it, and over both what the operator must find in its pods again."""
    own = _template(job, plan, settings)
    template: Json = merge(merge(own, without_nulls(job.spec.pod.template)), _indispensable(plan, own))
    alone = plan.network.host_network
    return template | {"spec": place(template["spec"], job.metadata.uid, one_per_node=alone, avoid=avoid)}


def _indispensable(plan: PodPlan, own: Json) -> Json:
    """Without its labels a pod would be none of the job's, and without the rendezvous each would train alone."""
    (container,) = own["spec"]["containers"]
    env = [entry for entry in container["env"] if is_reserved(entry["name"])]
    metadata = {"labels": plan.labels, "annotations": files.annotations(plan.files)}
    return {"metadata": metadata, "spec": {"containers": [{"name": CONTAINER, "env": env}]}}


def _grace_seconds(job: PseudoRealJob) -> int:
    """The template may set it, too."""
    spec = job.spec.pod.template.get("spec")
    chosen = spec.get("terminationGracePeriodSeconds") if isinstance(spec, dict) else None
    return chosen if isinstance(chosen, int) else job.spec.pod.termination_grace_period_seconds


def _template(job: PseudoRealJob, plan: PodPlan, settings: Settings) -> Json:
    scheduling = job.spec.scheduling
    spec: Json = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _grace_seconds(job),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _pod_security(settings),
        "containers": [_container(job, plan, settings)],
        "volumes": _volumes(job, plan, settings),
    }
    if plan.trains:
        spec["subdomain"] = network_name(job.metadata.name, job.metadata.uid)
    if scheduling.priority_class_name:
        spec["priorityClassName"] = scheduling.priority_class_name
    annotations = network.annotations(plan.network) | files.annotations(plan.files)
    metadata: Json = {"labels": plan.labels, "annotations": annotations}
    return {"metadata": metadata, "spec": spec | network.pod_fields(plan.network)}


def _container(job: PseudoRealJob, plan: PodPlan, settings: Settings) -> Json:
    return {
        "name": CONTAINER,
        "image": job.spec.pod.image or settings.trainer_image,
        "imagePullPolicy": settings.pull_policy,
        "command": ["python", "-m", "pseudoreal_trainer.cli.pod", f"{CONFIG_DIRECTORY}/{CONFIG_FILE}"],
        "env": _environment(job, plan, settings),
        "resources": network.resources(plan.network, plan.resources),
        "volumeMounts": _mounts(job, plan, settings),
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": network.capabilities(plan.network),
        },
    }


def _environment(job: PseudoRealJob, plan: PodPlan, settings: Settings) -> list[Json]:
    values = {
        "HOME": "/tmp",
        "PYTHONUNBUFFERED": "1",
        "OMP_WAIT_POLICY": "passive",
        "PSEUDOREAL_TERMINATION_LOG": TERMINATION_LOG,
    }
    of_training = _training_environment(job, plan, settings) if plan.trains else []
    chosen: list[Json] = [{"name": variable.name, "value": variable.value} for variable in job.spec.pod.env]
    merged: list[Json] = merge(_fixed(values) + of_training, chosen)
    return merged


def _training_environment(job: PseudoRealJob, plan: PodPlan, settings: Settings) -> list[Json]:
    values = network.environment(plan.network)
    values |= network.nccl_config(plan.network, of_site=settings.nccl_config is not None)
    if any(name.endswith("/gpu") for name in plan.resources.limits):
        values["NCCL_DEBUG"] = "WARN"
    values |= reporting.environment(settings) | _rendezvous(job, plan)
    named = [
        _field(NODE_NAME, "spec.nodeName"),
        _field("PET_NODE_RANK", f"metadata.annotations['{COMPLETION_INDEX}']"),
    ]
    return _fixed(values) + named + network.host_environment(plan.network)


def _rendezvous(job: PseudoRealJob, plan: PodPlan) -> dict[str, str]:
    """torchrun reads its options from PET_*. The id has the execution in it, so that a stale worker cannot join."""
    assert plan.rendezvous_id is not None, "only training meets"
    service = network_name(job.metadata.name, job.metadata.uid)
    return {
        "PET_NNODES": str(plan.workers),
        "PET_NPROC_PER_NODE": str(plan.processes),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{plan.name}-0.{service}:{plan.rendezvous_port}",
        "PET_RDZV_ID": plan.rendezvous_id,
        "PET_MAX_RESTARTS": "0",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_shutdown_seconds(_grace_seconds(job))),
    }


def _shutdown_seconds(grace: int) -> int:
    """After a SIGTERM, torchrun kills its ranks: late enough for a checkpoint, before the kubelet kills the pod."""
    return max(1, grace - min(20, ceil(grace / 6)))


def _fixed(values: dict[str, str]) -> list[Json]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _field(name: str, path: str) -> Json:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _volumes(job: PseudoRealJob, plan: PodPlan, settings: Settings) -> list[Json]:
    spec = job.spec
    volumes: list[Json] = [
        files.volume(plan.files),
        _work_volume(job),
        {"name": "tmp", "emptyDir": {}},
    ]
    if spec.data.volume:
        volumes.append({**spec.data.volume, "name": "data"})
    if plan.disk is not None:
        volumes.append({**plan.disk, "name": "offload"})
    reports = reporting.volumes(settings) if plan.trains else []
    return volumes + network.volumes(plan.network) + reports


def _mounts(job: PseudoRealJob, plan: PodPlan, settings: Settings) -> list[Json]:
    spec = job.spec
    mounts: list[Json] = [
        files.mount(),
        _work_mount(spec.checkpoint),
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if spec.data.volume:
        mounts.append({"name": "data", "mountPath": spec.data.path, "readOnly": True})
    if plan.disk is not None:
        mounts.append({"name": "offload", "mountPath": OFFLOAD_DIRECTORY})
    reports = reporting.mounts(settings) if plan.trains else []
    return mounts + network.mounts(plan.network) + reports


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


def _pod_security(settings: Settings) -> Json:
    return {
        "runAsNonRoot": True,
        **settings.pod_ids,
        # Walking a volume of checkpoints to change owners that are right already takes minutes.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
