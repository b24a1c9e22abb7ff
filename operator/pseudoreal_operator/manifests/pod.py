"""The pod template of a stage. Pure.

The files in CONFIG_DIRECTORY are annotations of the pod, shown by a volume of the downward API. So the files exist as
long as the pod: they cannot be missing, be left behind or be changed under a pod, as a separate object could. To report
to the operator, a training pod has a URL, a token that opens nothing else, and a CA certificate.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from pseudoreal_api.names import (
    CONFIG_DIRECTORY,
    CONFIG_FILE,
    CONTAINER,
    OFFLOAD_DIRECTORY,
    RENDEZVOUS_PORT,
    RENDEZVOUS_SECRET,
    RENDEZVOUS_SECRET_DIRECTORY,
    RENDEZVOUS_SECRET_FILE,
    REPORT_CA_FILE,
    REPORT_TOKEN_DIRECTORY,
    REPORT_TOKEN_FILE,
    WORK_DIRECTORY,
    claim_name,
    file_annotation,
    is_reserved_variable,
    network_name,
)
from pseudoreal_api.spec.checkpoint import HuggingFaceWeights
from pseudoreal_api.spec.job import PseudoRealJob, PseudoRealJobSpec
from pseudoreal_api.spec.network import Network
from pseudoreal_api.spec.phase import Phase, Resources
from pseudoreal_api.spec.pod import EnvVar, Pod
from pseudoreal_api.wire.reports import METRICS_PORT, NODE_NAME, REPORT_AUDIENCE, REPORT_URL, TOPOLOGY_DOMAIN

from pseudoreal_operator.manifests import network
from pseudoreal_operator.manifests.exclusion import exclude_nodes
from pseudoreal_operator.manifests.overlay import merge, with_placement, without_nulls
from pseudoreal_operator.manifests.scheduling import Gang, topology_annotations, topology_by_affinity
from pseudoreal_operator.observe.reading import COMPLETION_INDEX, WORKERS_VARIABLE
from pseudoreal_operator.settings import Settings

Json = dict[str, Any]

TOKEN_SECONDS = 3600
_GRACE_SECONDS = 120
"""Default grace period of the pods, in seconds."""
_FILES = "config"
TERMINATION_LOG = "/dev/termination-log"
CREDENTIALS = {
    "s3": {
        "AWS_ACCESS_KEY_ID": False,
        "AWS_SECRET_ACCESS_KEY": False,
        "AWS_SESSION_TOKEN": True,
        "AWS_DEFAULT_REGION": True,
    },
    # Azure's keys come in several forms.
    "az": {f"AZURE_STORAGE_{key}": True for key in ("ACCOUNT_NAME", "ACCOUNT_KEY", "SAS_TOKEN", "CONNECTION_STRING")},
}
"""Scheme of the storage -> key of the credentials' Secret -> whether the key may be missing. Only these keys become
variables: otherwise the author of the Secret could set the variables that control rendezvous and reports."""
_NOT_INJECTED_LABELS = {"sidecar.istio.io/inject": "false"}
"""Labels that opt out of the proxies of service meshes. An injected proxy would outlive the trainer, and the
connections between ranks would go through the proxy."""
_NOT_INJECTED = {"sidecar.istio.io/inject": "false", "linkerd.io/inject": "disabled"}
"""Annotations that opt out of injected proxies. Istio read the annotation before it had the label."""
_NOT_EVICTED = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
"""Annotations that keep autoscalers from moving a pod to save a node: all other pods would have to restart with it."""


@dataclass(frozen=True)
class PodPlan:
    """The parts of a pod that differ between stages.

    `accelerators`: number of accelerators that a pod requests. `files`: name -> text of the files in CONFIG_DIRECTORY.
    `rendezvous_id`: None for a delink, which is one process in the default network. `disk`: volume source for offloaded
    state; None if no state can be on disk. `weights`: Hugging Face weights that the stage may begin with, if they have
    a volume. `gang`: None if pods are scheduled one by one. `on_one_node`: whether the pods mount a volume that one
    node has at a time.
    """

    name: str
    labels: dict[str, str]
    files: dict[str, str]
    resources: Resources
    pod: Pod
    """The user's settings for the pods of the stage."""
    workers: int = 1
    processes: int = 1
    spares: int = 0
    accelerators: int = 0
    rendezvous_id: str | None = None
    rendezvous_port: int = RENDEZVOUS_PORT
    network: Network = field(default_factory=Network)
    disk: Json | None = None
    weights: HuggingFaceWeights | None = None
    gang: Gang | None = None
    on_one_node: bool = False

    @property
    def is_training(self) -> bool:
        return self.rendezvous_id is not None

    @property
    def has_rendezvous(self) -> bool:
        """Whether several workers meet in a rendezvous, which the Secret of their job protects."""
        return self.is_training and self.workers > 1


def pod_template(
    job: PseudoRealJob, plan: PodPlan, settings: Settings, avoid: Sequence[str] = (), exclude: Iterable[str] = ()
) -> Json:
    """Return the operator's template, the user's template over it, and over both the fields that the operator relies
    on."""
    own = _template(job, plan, settings)
    template: Json = merge(merge(own, without_nulls(plan.pod.template)), _indispensable(plan, own))
    alone, topology = plan.network.host_network, topology_by_affinity(job.spec.scheduling) if plan.is_training else None
    spec = with_placement(
        template["spec"],
        plan.labels,
        one_per_node=alone,
        one_node=plan.on_one_node and plan.workers + plan.spares > 1,
        avoid=avoid,
        topology=topology,
    )
    return template | {"spec": exclude_nodes(spec, exclude)}


def _indispensable(plan: PodPlan, own: Json) -> Json:
    """Return the fields that the overlay cannot change: without its labels a pod would not belong to the job, and
    without the rendezvous each pod would train alone."""
    (container,) = own["spec"]["containers"]
    env = [entry for entry in container["env"] if is_reserved_variable(entry["name"])]
    metadata = {"labels": plan.labels, "annotations": file_annotations(plan.files)}
    return {"metadata": metadata, "spec": {"containers": [{"name": CONTAINER, "env": env}]}}


def pod_of(spec: PseudoRealJobSpec, phase: Phase) -> Pod:
    """Return the user's pod settings for a phase: the phase's over the job's."""
    job, own = spec.pod, phase.pod
    return Pod(
        image=own.image or job.image,
        env=list({variable.name: variable for variable in (*job.env, *own.env)}.values()),
        termination_grace_period_seconds=own.termination_grace_period_seconds or job.termination_grace_period_seconds,
        template=merge(job.template, own.template),
    )


def _grace_seconds(pod: Pod) -> int:
    """Return the grace period of the pods in seconds; the user's template comes first."""
    spec = pod.template.get("spec")
    chosen = spec.get("terminationGracePeriodSeconds") if isinstance(spec, dict) else None
    return chosen if isinstance(chosen, int) else pod.termination_grace_period_seconds or _GRACE_SECONDS


def _template(job: PseudoRealJob, plan: PodPlan, settings: Settings) -> Json:
    scheduling, gang = job.spec.scheduling, plan.gang
    marks = gang.pod_annotations if gang else {}
    marks |= topology_annotations(scheduling) if plan.is_training else {}
    return {
        "metadata": {
            "labels": _NOT_INJECTED_LABELS | plan.labels | (gang.pod_labels if gang else {}),
            "annotations": _NOT_INJECTED
            | _NOT_EVICTED
            | network.annotations(plan.network)
            | marks
            | file_annotations(plan.files),
        },
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": _grace_seconds(plan.pod),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                **settings.pod_ids,
                # By default, each start sets the owners of all files again, which takes minutes on a volume of
                # checkpoints.
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [_container(job, plan, settings)],
            "volumes": _volumes(job, plan, settings),
            **({"subdomain": network_name(job.metadata.name, job.metadata.uid)} if plan.is_training else {}),
            **({"priorityClassName": scheduling.priority_class_name} if scheduling.priority_class_name else {}),
            **network.pod_fields(plan.network),
            **(gang.pod_fields if gang else {}),
        },
    }


def _container(job: PseudoRealJob, plan: PodPlan, settings: Settings) -> Json:
    return {
        "name": CONTAINER,
        "image": plan.pod.image or settings.trainer_image,
        "imagePullPolicy": settings.pull_policy,
        "command": ["python", "-m", "pseudoreal_trainer.cli.pod", f"{CONFIG_DIRECTORY}/{CONFIG_FILE}"],
        "env": _environment(job, plan, settings),
        **_ports(plan, settings),
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
    if not plan.accelerators:
        # Images with CUDA ask NVIDIA's container runtime for all GPUs of the node, other pods' as well. Where pods ask
        # for GPUs, the device plugin sets the variable.
        values["NVIDIA_VISIBLE_DEVICES"] = "void"
    training = _training_environment(job, plan, settings) if plan.is_training else []
    own = _fixed(values) + training + _storage_environment(job)
    chosen = [_chosen(variable) for variable in plan.pod.env]
    # Replace whole entries: a merged one could have both value and valueFrom.
    return list({entry["name"]: entry for entry in (*own, *chosen)}.values())


def _chosen(variable: EnvVar) -> Json:
    """Return a user's variable as an entry of a container's env."""
    value = {"value": variable.value} if variable.value is not None else {"valueFrom": variable.value_from}
    return {"name": variable.name, **value}


def _storage_environment(job: PseudoRealJob) -> list[Json]:
    objects = job.spec.checkpoint.storage.object_storage
    if objects is None:
        return []
    secret = objects.credentials_secret_name
    keys = [_key(name, secret, optional) for name, optional in CREDENTIALS[objects.scheme].items()] if secret else []
    return keys + (_fixed({"AWS_ENDPOINT_URL": objects.endpoint}) if objects.endpoint else [])


def _key(name: str, secret: str, optional: bool) -> Json:
    """Return a variable with the value that the Secret has for a key of the same name."""
    key = {"name": secret, "key": name} | ({"optional": True} if optional else {})
    return {"name": name, "valueFrom": {"secretKeyRef": key}}


def _metrics_port(plan: PodPlan, settings: Settings) -> int | None:
    """Return the port of /metrics; None: the pod has none. In the network of a node, jobs would need the same port."""
    return settings.trainer_metrics_port if plan.is_training and not plan.network.host_network else None


def _ports(plan: PodPlan, settings: Settings) -> Json:
    port = _metrics_port(plan, settings)
    return {} if port is None else {"ports": [{"name": "metrics", "containerPort": port}]}


def _training_environment(job: PseudoRealJob, plan: PodPlan, settings: Settings) -> list[Json]:
    values = network.environment(plan.network)
    values |= network.nccl_config(plan.network, of_site=settings.nccl_config is not None)
    if plan.accelerators:
        values["NCCL_DEBUG"] = "WARN"
    values |= report_environment(settings) | _rendezvous(job, plan)
    if (port := _metrics_port(plan, settings)) is not None:
        values[METRICS_PORT] = str(port)
    named = [
        _field(NODE_NAME, "spec.nodeName"),
        _field("PET_NODE_RANK", f"metadata.annotations['{COMPLETION_INDEX}']"),
    ]
    if topology := job.spec.scheduling.topology:
        named.append(_field(TOPOLOGY_DOMAIN, f"metadata.labels['{topology.key}']"))
    return _fixed(values) + named + network.host_environment(plan.network)


def _rendezvous(job: PseudoRealJob, plan: PodPlan) -> dict[str, str]:
    """Return the options of torchrun, as the PET_* variables from which torchrun reads them. The rendezvous id contains
    the execution, so that a stale worker cannot join."""
    assert plan.rendezvous_id is not None, "only training pods have a rendezvous"
    service = network_name(job.metadata.name, job.metadata.uid)
    secret = (
        {RENDEZVOUS_SECRET: f"{RENDEZVOUS_SECRET_DIRECTORY}/{RENDEZVOUS_SECRET_FILE}"} if plan.has_rendezvous else {}
    )
    return {
        WORKERS_VARIABLE: str(plan.workers),
        "PET_NPROC_PER_NODE": str(plan.processes),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{plan.name}-0.{service}:{plan.rendezvous_port}",
        "PET_RDZV_ID": plan.rendezvous_id,
        "PET_MAX_RESTARTS": "0",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_shutdown_seconds(_grace_seconds(plan.pod))),
        **secret,
    }


def _shutdown_seconds(grace: int) -> int:
    """Return the seconds after a SIGTERM at which torchrun kills its ranks: late enough for a checkpoint, before the
    kubelet kills the pod."""
    return max(1, grace - min(20, ceil(grace / 6)))


def _fixed(values: dict[str, str]) -> list[Json]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _field(name: str, path: str) -> Json:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _volumes(job: PseudoRealJob, plan: PodPlan, settings: Settings) -> list[Json]:
    spec = job.spec
    volumes: list[Json] = [
        files_volume(plan.files),
        _work_volume(job),
        {"name": "tmp", "emptyDir": {}},
    ]
    if spec.data.volume:
        volumes.append({**spec.data.volume, "name": "data"})
    if plan.weights is not None:
        volumes.append({**(plan.weights.volume or {}), "name": "weights"})
    if plan.disk is not None:
        volumes.append({**plan.disk, "name": "offload"})
    if plan.has_rendezvous:
        # Mount a file in place of a variable: anyone who may read pods sees the values of variables in the pod spec.
        name = network_name(job.metadata.name, job.metadata.uid)
        items = [{"key": RENDEZVOUS_SECRET_FILE, "path": RENDEZVOUS_SECRET_FILE}]
        volumes.append({"name": "rendezvous", "secret": {"secretName": name, "items": items}})
    reports = report_volumes(settings) if plan.is_training else []
    return volumes + network.volumes(plan.network) + reports


def _mounts(job: PseudoRealJob, plan: PodPlan, settings: Settings) -> list[Json]:
    spec = job.spec
    mounts: list[Json] = [
        files_mount(),
        _work_mount(job),
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if spec.data.volume:
        mounts.append({"name": "data", "mountPath": spec.data.path, "readOnly": True})
    if plan.weights is not None:
        mounts.append({"name": "weights", "mountPath": plan.weights.path, "readOnly": True})
    if plan.disk is not None:
        mounts.append({"name": "offload", "mountPath": OFFLOAD_DIRECTORY})
    if plan.has_rendezvous:
        mounts.append({"name": "rendezvous", "mountPath": RENDEZVOUS_SECRET_DIRECTORY, "readOnly": True})
    reports = report_mounts(settings) if plan.is_training else []
    return mounts + network.mounts(plan.network) + reports


def _work_volume(job: PseudoRealJob) -> Json:
    """Return the volume of the work directory. With checkpoints in object storage, the pod keeps only metrics.jsonl
    there."""
    volume = job.spec.checkpoint.storage.mounted
    if volume is None:
        return {"name": "work", "emptyDir": {}}
    claim = volume.claim_name or claim_name(job.metadata.name)
    return {"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim}}


def _work_mount(job: PseudoRealJob) -> Json:
    volume = job.spec.checkpoint.storage.mounted
    if volume is None:
        return {"name": "work", "mountPath": WORK_DIRECTORY}
    return {"name": "checkpoints", "mountPath": volume.mount_path}


def file_annotations(files: dict[str, str]) -> dict[str, str]:
    return {file_annotation(name): text for name, text in files.items()}


def files_volume(files: dict[str, str]) -> Json:
    items = [{"path": name, "fieldRef": {"fieldPath": _annotation_path(name)}} for name in files]
    return {"name": _FILES, "downwardAPI": {"items": items}}


def files_mount() -> Json:
    return {"name": _FILES, "mountPath": CONFIG_DIRECTORY, "readOnly": True}


def _annotation_path(file: str) -> str:
    return f"metadata.annotations['{file_annotation(file)}']"


def report_environment(settings: Settings) -> dict[str, str]:
    return {REPORT_URL: settings.report_url} if settings.report_url else {}


def report_files(settings: Settings) -> dict[str, str]:
    """Return the file with the CA certificates by which pods verify the endpoint for reports."""
    return {REPORT_CA_FILE: settings.report_ca} if settings.report_url and settings.report_ca else {}


def report_volumes(settings: Settings) -> list[Json]:
    if not settings.report_url:
        return []
    token = {"audience": REPORT_AUDIENCE, "expirationSeconds": TOKEN_SECONDS, "path": REPORT_TOKEN_FILE}
    return [{"name": "report-token", "projected": {"sources": [{"serviceAccountToken": token}]}}]


def report_mounts(settings: Settings) -> list[Json]:
    if not settings.report_url:
        return []
    return [{"name": "report-token", "mountPath": REPORT_TOKEN_DIRECTORY, "readOnly": True}]
