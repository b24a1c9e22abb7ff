"""Objects that the operator creates for a job: a claim, a headless Service, a NetworkPolicy, a Secret, PodGroups, and
an Indexed Job per execution.

Objects do not change after their creation, except that the operator may fail a Job early (maxFailedIndexes: 0). Either
an object depends only on immutable fields of the spec, or its name contains the number of the execution and each
execution gets a new object.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pseudoreal_api.base import API_VERSION, KIND
from pseudoreal_api.names import (
    ANNOTATION_EXCLUDES_UNTIL,
    ANNOTATION_LAST_STEPS,
    CONFIG_FILE,
    LABEL_EXECUTION,
    LABEL_JOB,
    LABEL_JOB_UID,
    LABEL_PHASE,
    LABEL_STAGE,
    NCCL_CONFIG_FILE,
    OFFLOAD_DIRECTORY,
    WORK_DIRECTORY,
    claim_name,
    network_name,
    work_directory,
)
from pseudoreal_api.resolved.config import DelinkConfig, DiscardConfig, PhaseConfig
from pseudoreal_api.resolved.resolve import accelerators_of, delink_config, phase_config, rank_counts
from pseudoreal_api.spec.checkpoint import HuggingFaceWeights, VolumeStorage
from pseudoreal_api.spec.job import PseudoRealJob, PseudoRealJobSpec
from pseudoreal_api.spec.phase import Phase, Resources
from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_api.wire.contract import with_contract

from pseudoreal_operator import clock
from pseudoreal_operator.failures.classify import allowed_restarts_in_place
from pseudoreal_operator.manifests.disk import claim_size, size_limit
from pseudoreal_operator.manifests.exclusion import excluded_nodes
from pseudoreal_operator.manifests.network import rendezvous_port
from pseudoreal_operator.manifests.overlay import HOSTNAME, merge
from pseudoreal_operator.manifests.pod import PodPlan, pod_of, pod_template, report_files
from pseudoreal_operator.manifests.scheduling import Gang, gang_of, is_queued, queue_labels
from pseudoreal_operator.observe.claims import Claim
from pseudoreal_operator.observe.stages import Execution, Stage, StageKind, job_at_size, last_steps_of
from pseudoreal_operator.settings import Settings

Json = dict[str, Any]


def children(
    job: PseudoRealJob, stage: Stage, status: PseudoRealJobStatus, settings: Settings, claims: Sequence[Claim] = ()
) -> list[Json]:
    """Return the children of a stage in the order of their creation. The Job is last, so that all other children exist
    if the Job exists. The number of the execution, the number of workers and the nodes to avoid come from the
    status. `claims`: known claims that the pods mount; a claim that the operator has yet to create is as its manifest
    says."""
    on_one_node = stays_on_one_node(job, claims)
    job = job_at_size(job, status, stage)
    plan = replace(_pod_plan(job, stage, status, settings), on_one_node=on_one_node)
    made = network_children(job, settings) if stage.kind is StageKind.TRAIN else []
    if plan.has_rendezvous:
        made.append(_secret(job))
    if gang := gang_of(job, stage):
        made.append(_pod_group(job, gang))
    excluded = excluded_nodes(status)
    template = pod_template(job, plan, settings, status.avoided_nodes, excluded)
    made.append(_job(job, stage, plan, template))
    annotations = {}
    if steps := last_steps_of(job.spec, stage):
        annotations[ANNOTATION_LAST_STEPS] = steps
    if excluded:
        annotations[ANNOTATION_EXCLUDES_UNTIL] = clock.to_text(max(excluded.values()))
    if annotations:
        made[-1]["metadata"]["annotations"] = annotations
    return made


def stays_on_one_node(job: PseudoRealJob, claims: Sequence[Claim]) -> bool:
    """Return whether a claim that the pods mount keeps them on one node. A volume follows the pods of an execution to
    another node, or its own node affinity holds them, so nothing keeps executions together."""
    made, name = claim_manifest(job), claim_name(job.metadata.name)
    if made is not None and not any(claim.name == name and claim.modes for claim in claims):
        claims = [*claims, Claim(name, modes=tuple(made["spec"].get("accessModes") or ()))]
    return any(claim.is_for_one_node for claim in claims)


def network_children(job: PseudoRealJob, settings: Settings) -> list[Json]:
    """Return the Service, and the NetworkPolicy if the job is isolated; the pods of all executions share them."""
    return [_service(job), *([network_policy(job, settings)] if is_isolated(job) else [])]


def _pod_plan(job: PseudoRealJob, stage: Stage, status: PseudoRealJobStatus, settings: Settings) -> PodPlan:
    execution = stage.execution(status.execution)
    name, marks = execution.name(job.metadata), execution_labels(job, execution)
    files = {CONFIG_FILE: json.dumps(with_contract(_config(job, stage, execution, status)))}
    phase = job.spec.phases[stage.index]
    if stage.kind is StageKind.DELINK:
        return PodPlan(name, marks, files, _without_devices(phase.resources), job.spec.pod)
    layout = rank_counts(job.spec, phase)
    return PodPlan(
        name,
        marks,
        files | _site_files(job, settings) | report_files(settings),
        phase.resources,
        pod_of(job.spec, phase),
        workers=layout.workers,
        processes=layout.processes_per_worker,
        spares=phase.spares,
        rendezvous_id=f"{job.metadata.uid}-{execution.phase}-{execution.number}",
        rendezvous_port=rendezvous_port(job),
        accelerators=accelerators_of(job.spec, phase),
        network=job.spec.network,
        disk=_disk(job, phase) if phase.offload.may_use_disk else None,
        weights=_weights(job) if stage.index == 0 else None,
        gang=gang_of(job, stage),
    )


def _weights(job: PseudoRealJob) -> HuggingFaceWeights | None:
    start = job.spec.checkpoint.start_from
    return start.mounted if start else None


def _disk(job: PseudoRealJob, phase: Phase) -> Json:
    return phase.offload.volume or {"emptyDir": {"sizeLimit": size_limit(job.spec, phase)}}


def _without_devices(resources: Resources) -> Resources:
    """Return the resources without extended resources such as GPUs, for a delink: a delink copies bytes, and needs the
    memory of the phase that it leads into."""

    def plain(amounts: dict[str, int | str]) -> dict[str, int | str]:
        return {name: amount for name, amount in amounts.items() if "/" not in name}

    return Resources(limits=plain(resources.limits), requests=plain(resources.requests))


def _config(
    job: PseudoRealJob, stage: Stage, execution: Execution, status: PseudoRealJobStatus
) -> PhaseConfig | DelinkConfig:
    volume = job.spec.checkpoint.storage.mounted
    folder = work_directory(volume.mount_path if volume else WORK_DIRECTORY, job.metadata.name, job.metadata.uid)
    here: Json = {"execution": execution.number, "work_directory": folder, "discards": _discards(status) or None}
    if stage.kind is StageKind.TRAIN:
        in_place = allowed_restarts_in_place(job.spec.restart, status)
        return phase_config(job, stage.index, offload_directory=OFFLOAD_DIRECTORY, in_place=in_place, **here)
    return delink_config(job, stage.index, **here)


def _discards(status: PseudoRealJobStatus) -> dict[str, list[DiscardConfig]]:
    return {
        phase.name: [DiscardConfig.model_validate(rule.to_dict()) for rule in phase.discards]
        for phase in status.phases
        if phase.discards
    }


def _site_files(job: PseudoRealJob, settings: Settings) -> dict[str, str]:
    own = job.spec.network.nccl_config_map_name is not None
    return {} if own or settings.nccl_config is None else {NCCL_CONFIG_FILE: settings.nccl_config}


def _service(job: PseudoRealJob) -> Json:
    """Return the headless Service. The Service gives pods host names before they are ready, because pods become ready
    only after they have found one another."""
    port = rendezvous_port(job)
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": training_pod_labels(job),
        "ports": [{"name": "rendezvous", "port": port, "protocol": "TCP", "targetPort": port}],
    }
    name = network_name(job.metadata.name, job.metadata.uid)
    return child_manifest("Service", "v1", job, name, labels_with_uid(job)) | {"spec": spec}


def _secret(job: PseudoRealJob) -> Json:
    """Return the Secret by which workers recognize each other, the same for all executions. `create_child` generates
    the random data."""
    name = network_name(job.metadata.name, job.metadata.uid)
    return child_manifest("Secret", "v1", job, name, labels_with_uid(job)) | {"type": "Opaque", "immutable": True}


def _pod_group(job: PseudoRealJob, gang: Gang) -> Json:
    return child_manifest("PodGroup", gang.api_version, job, gang.name, labels_with_uid(job)) | {"spec": gang.spec}


def _job(job: PseudoRealJob, stage: Stage, plan: PodPlan, template: Json) -> Json:
    scheduling = job.spec.scheduling
    labels = plan.labels | queue_labels(scheduling, stage.kind)
    manifest = child_manifest("Job", "batch/v1", job, plan.name, labels)
    manifest["spec"] = {
        # Create the Job suspended, so that nothing starts before the queue has seen the Job, even if the queue's
        # webhook does not answer.
        **({"suspend": True} if is_queued(scheduling, stage.kind) else {}),
        "completionMode": "Indexed",
        "completions": plan.workers + plan.spares,
        "parallelism": plan.workers + plan.spares,
        # With this policy, spare pods that were not needed end as soon as the workers have succeeded.
        **({"successPolicy": {"rules": [{"succeededCount": plan.workers}]}} if plan.spares else {}),
        # No pod is replaced: the operator restarts all of them together. And a failed pod does not make the Job
        # controller delete the others, whose termination messages tell where the fault began.
        "backoffLimitPerIndex": 0,
        # A pod that is being deleted counts as failed only once it is gone.
        "podReplacementPolicy": "Failed",
        "template": template,
    }
    return manifest


def kind_and_name(manifest: Json) -> tuple[str, str]:
    """Return kind and name of a manifest."""
    return manifest["kind"], manifest["metadata"]["name"]


def claim_manifest(job: PseudoRealJob) -> Json | None:
    """Return the claim; None if the job needs no claim, or names an existing claim. A claim that stays after its job
    has neither an owner nor the uid of the job: a later job of the same name uses the claim again."""
    volume = job.spec.checkpoint.storage.mounted
    if volume is None or volume.claim_name is not None:
        return None
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(job, volume),
        "spec": _claim_spec(job.spec, volume),
    }


def _metadata(job: PseudoRealJob, volume: VolumeStorage) -> Json:
    metadata: Json = {
        "name": claim_name(job.metadata.name),
        "namespace": job.metadata.namespace,
        "labels": job_labels(job),
    }
    if volume.retention_policy == "Delete":
        metadata["labels"] = labels_with_uid(job)
        metadata["ownerReferences"] = [owner_reference(job)]
    return metadata


def _claim_spec(spec: PseudoRealJobSpec, volume: VolumeStorage) -> Json:
    """Return the user's claim template, completed with the needs of the job."""
    needed: Json = {
        "accessModes": ["ReadWriteMany" if needs_nodes(spec) else "ReadWriteOnce"],
        "resources": {"requests": {"storage": claim_size(spec)}},
    }
    wanted: Json = merge(needed, volume.claim_template.spec if volume.claim_template else {})
    return wanted


def needs_nodes(spec: PseudoRealJobSpec) -> bool:
    """Return whether the spec shows that the workers of a phase need several nodes: they ask for devices such as GPUs,
    of which a node has few, or the spec says how they share nodes. The operator reads no nodes, so it cannot count
    what a node has."""
    network, topology, gang = spec.network, spec.scheduling.topology, spec.scheduling.gang
    if not any(phase.workers > 1 for phase in spec.phases):
        return False
    if network.host_network or network.rdma_resource or gang.policy != "None":
        return True
    if topology and topology.key != HOSTNAME:
        return True
    return any(_asks_for_devices(spec, phase) for phase in spec.phases if phase.workers > 1)


def _asks_for_devices(spec: PseudoRealJobSpec, phase: Phase) -> bool:
    """Return whether a worker of the phase asks for devices, by its resources or by the user's pod template."""
    asked = [phase.resources.to_dict()]
    pod = pod_of(spec, phase).template.get("spec")
    if isinstance(pod, dict):
        if pod.get("resourceClaims"):
            return True
        asked += [container.get("resources") or {} for container in pod.get("containers") or []]
    amounts = (one.get(kind) or {} for one in asked for kind in ("limits", "requests"))
    return any("/" in name for names in amounts for name in names)


def is_isolated(job: PseudoRealJob) -> bool:
    """Return whether the job has a NetworkPolicy. A policy would have no effect on pods in the network of their
    node."""
    return job.spec.network.isolation == "JobOnly" and not job.spec.network.host_network


def network_policy(job: PseudoRealJob, settings: Settings) -> Json:
    """Return the policy: only pods of the job reach its training pods, at any port, and the site's scrapers reach the
    port of /metrics. Connections that the pods open are not restricted."""
    peers = {"podSelector": {"matchLabels": {LABEL_JOB_UID: job.metadata.uid}}}
    spec = {
        "podSelector": {"matchLabels": training_pod_labels(job)},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [peers]}, *_scraping(settings)],
    }
    name = network_name(job.metadata.name, job.metadata.uid)
    return child_manifest("NetworkPolicy", "networking.k8s.io/v1", job, name, labels_with_uid(job)) | {"spec": spec}


def _scraping(settings: Settings) -> list[Json]:
    """Return the rule for scrapers; no rule without scrapers, because a rule without peers would admit all traffic."""
    port = settings.trainer_metrics_port
    if port is None or not settings.scrapers:
        return []
    return [{"from": [*settings.scrapers], "ports": [{"port": port, "protocol": "TCP"}]}]


def child_manifest(kind: str, api_version: str, job: PseudoRealJob, name: str, labels: dict[str, str]) -> Json:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": job.metadata.namespace,
            "labels": labels,
            "ownerReferences": [owner_reference(job)],
        },
    }


def execution_labels(job: PseudoRealJob, execution: Execution) -> dict[str, str]:
    """Return the labels of the Job and the pods of one execution."""
    return labels_with_uid(job) | {
        LABEL_PHASE: execution.phase,
        LABEL_EXECUTION: str(execution.number),
        LABEL_STAGE: execution.kind.value,
    }


def labels_with_uid(job: PseudoRealJob) -> dict[str, str]:
    """Return the labels of objects that belong to this job, and not to a later job of the same name."""
    return job_labels(job) | {LABEL_JOB_UID: job.metadata.uid}


def job_labels(job: PseudoRealJob) -> dict[str, str]:
    return {
        "app.kubernetes.io/managed-by": "pseudoreal-operator",
        "app.kubernetes.io/part-of": "pseudoreal",
        LABEL_JOB: job.metadata.name,
    }


def training_pod_labels(job: PseudoRealJob) -> dict[str, str]:
    """Return the labels that select the training pods of all executions: two executions never run at once, and the
    rendezvous keeps lingering pods out."""
    return {LABEL_JOB_UID: job.metadata.uid, LABEL_STAGE: StageKind.TRAIN.value}


def owner_reference(job: PseudoRealJob) -> Json:
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": job.metadata.name,
        "uid": job.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
