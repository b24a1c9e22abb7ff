"""The children of one attempt at one stage: ConfigMap, headless Service, NetworkPolicy, Indexed Job.

They never change once they are made: what they depend on is immutable in the spec, and the attempt is in their names.
"""

from collections.abc import Sequence
from typing import Any

from pseudoreal_api.names import (
    CONFIG_FILE,
    LABEL_ATTEMPT,
    NCCL_CONFIG_FILE,
    OFFLOAD_DIRECTORY,
    WORK_DIRECTORY,
    work_directory,
)
from pseudoreal_api.phase_spec import Resources
from pseudoreal_api.resolve import delink_config, phase_config, resolve_layout
from pseudoreal_api.resolved import DelinkConfig, DiscardConfig, PhaseConfig
from pseudoreal_api.spec import PseudoRealJob
from pseudoreal_api.status import PseudoRealJobStatus

from pseudoreal_operator.manifests import reporting
from pseudoreal_operator.manifests.isolation import is_isolated, network_policy
from pseudoreal_operator.manifests.network import rendezvous_port
from pseudoreal_operator.manifests.objects import child, labels, pods_of
from pseudoreal_operator.manifests.pod import PodPlan, pod_template
from pseudoreal_operator.observe.observed import Role, Run
from pseudoreal_operator.observe.stages import Stage
from pseudoreal_operator.settings import Settings

Json = dict[str, Any]

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def children(job: PseudoRealJob, stage: Stage, status: PseudoRealJobStatus, settings: Settings) -> list[Json]:
    """In the order in which they must be made: the Job last. Of the status they take the numbers and the nodes."""
    run = stage.run(status.execution_attempt)
    plan = _pod_plan(job, stage, run, status.attempt)
    made = [_config_map(job, stage, run, status, settings)]
    if stage.role is Role.TRAIN:
        made.append(_service(job, run))
        if is_isolated(job):
            made.append(network_policy(job, run))
    made.append(_job(job, run, plan, settings, status.avoided_nodes))
    for manifest in made:
        manifest["metadata"]["labels"][LABEL_ATTEMPT] = str(status.attempt)
    return made


def _pod_plan(job: PseudoRealJob, stage: Stage, run: Run, attempt: int) -> PodPlan:
    name, marks = run.name(job.metadata.name), labels(job, run) | {LABEL_ATTEMPT: str(attempt)}
    phase = job.spec.phases[stage.index]
    if stage.role is Role.DELINK:
        return PodPlan(name, marks, _without_devices(phase.resources))
    layout = resolve_layout(job.spec, phase)
    return PodPlan(
        name,
        marks,
        phase.resources,
        workers=layout.workers,
        processes=layout.processes_per_worker,
        rendezvous_id=f"{job.metadata.uid}-{run.phase}-{run.attempt}",
        rendezvous_port=rendezvous_port(job),
        network=job.spec.network,
        disk=(phase.offload.volume or {"emptyDir": {}}) if phase.offload.may_use_disk else None,
    )


def _without_devices(resources: Resources) -> Resources:
    """A delink copies bytes: it needs the memory of the phase that it leads into, but no GPU."""

    def plain(amounts: dict[str, int | str]) -> dict[str, int | str]:
        return {name: amount for name, amount in amounts.items() if "/" not in name}

    return Resources(limits=plain(resources.limits), requests=plain(resources.requests))


def _config_map(job: PseudoRealJob, stage: Stage, run: Run, status: PseudoRealJobStatus, settings: Settings) -> Json:
    data = {CONFIG_FILE: _config(job, stage, run, status).to_json(indent=2)}
    if stage.role is Role.TRAIN:
        data |= _site_files(job, settings) | reporting.files(settings)
    return child("ConfigMap", "v1", job, run) | {"data": data}


def _config(job: PseudoRealJob, stage: Stage, run: Run, status: PseudoRealJobStatus) -> PhaseConfig | DelinkConfig:
    checkpoint = job.spec.checkpoint
    mounted = checkpoint.path if checkpoint.volume else WORK_DIRECTORY
    folder = work_directory(mounted, job.metadata.name, job.metadata.uid)
    here: Json = {"attempt": run.attempt, "work_directory": folder, "discards": _discards(status) or None}
    if stage.role is Role.TRAIN:
        return phase_config(job, stage.index, offload_directory=OFFLOAD_DIRECTORY, **here)
    return delink_config(job, stage.index, **here)


def _discards(status: PseudoRealJobStatus) -> dict[str, list[DiscardConfig]]:
    return {
        phase.name: [DiscardConfig.model_validate(rule.to_dict()) for rule in phase.discards]
        for phase in status.phases
        if phase.discards
    }


def _site_files(job: PseudoRealJob, settings: Settings) -> dict[str, str]:
    own = job.spec.network.nccl_config is not None
    return {} if own or settings.nccl_config is None else {NCCL_CONFIG_FILE: settings.nccl_config}


def _service(job: PseudoRealJob, run: Run) -> Json:
    """Gives the pods host names, before they are ready: they become ready by finding one another."""
    port = rendezvous_port(job)
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": pods_of(job, run),
        "ports": [{"name": "rendezvous", "port": port, "protocol": "TCP", "targetPort": port}],
    }
    return child("Service", "v1", job, run) | {"spec": spec}


def _job(job: PseudoRealJob, run: Run, plan: PodPlan, settings: Settings, avoid: Sequence[str]) -> Json:
    manifest = child("Job", "batch/v1", job, run)
    if job.spec.scheduling.queue:
        manifest["metadata"]["labels"][QUEUE_LABEL] = job.spec.scheduling.queue
    manifest["spec"] = {
        "completionMode": "Indexed",
        "completions": plan.workers,
        "parallelism": plan.workers,
        # A pod is not replaced: the operator restarts all of them together. And one that fails does not make the Job
        # controller delete the others: what they say of their end tells where the fault began.
        "backoffLimitPerIndex": 0,
        # A pod that is going away counts as failed only once it is gone.
        "podReplacementPolicy": "Failed",
        "template": pod_template(job, plan, settings, avoid),
    }
    return manifest


def identity(manifest: Json) -> tuple[str, str]:
    """(kind, name)."""
    return manifest["kind"], manifest["metadata"]["name"]
