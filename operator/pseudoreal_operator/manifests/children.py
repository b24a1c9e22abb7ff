"""The children of one attempt at one stage: ConfigMap, headless Service, Indexed Job.

They never change once they are made: what they depend on is immutable in the spec, and the attempt is in their names.
"""

from functools import partial
from typing import Any

from pseudoreal_api.base import API_VERSION, KIND
from pseudoreal_api.names import (
    CONFIG_FILE,
    LABEL_ATTEMPT,
    LABEL_EXECUTION_ATTEMPT,
    LABEL_JOB,
    LABEL_JOB_UID,
    LABEL_PHASE,
    LABEL_ROLE,
    OFFLOAD_DIRECTORY,
    RENDEZVOUS_PORT,
    WORK_DIRECTORY,
    work_directory,
)
from pseudoreal_api.phase_spec import Resources
from pseudoreal_api.resolve import delink_config, phase_config, resolve_layout
from pseudoreal_api.spec import PseudoRealJob
from pseudoreal_api.status import PseudoRealJobStatus

from pseudoreal_operator.manifests.pod import PodPlan, pod_template
from pseudoreal_operator.observed import Role, Run
from pseudoreal_operator.settings import Settings
from pseudoreal_operator.stages import Stage

Json = dict[str, Any]

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def children(job: PseudoRealJob, stage: Stage, status: PseudoRealJobStatus, settings: Settings) -> list[Json]:
    """In the order in which they must be made: the Job last."""
    run = stage.run(status.execution_attempt)
    plan = _pod_plan(job, stage, run, status.attempt)
    service = [_service(job, run)] if stage.role is Role.TRAIN else []
    made = [_config_map(job, stage, run), *service, _job(job, run, plan, settings)]
    for manifest in made:
        manifest["metadata"]["labels"][LABEL_ATTEMPT] = str(status.attempt)
    return made


def labels(job: PseudoRealJob, run: Run) -> dict[str, str]:
    return {
        "app.kubernetes.io/managed-by": "pseudoreal-operator",
        "app.kubernetes.io/part-of": "pseudoreal",
        LABEL_JOB: job.metadata.name,
        LABEL_JOB_UID: job.metadata.uid,
        LABEL_PHASE: run.phase,
        LABEL_EXECUTION_ATTEMPT: str(run.attempt),
        LABEL_ROLE: run.role.value,
    }


def _pod_plan(job: PseudoRealJob, stage: Stage, run: Run, attempt: int) -> PodPlan:
    name, marks = run.name(job.metadata.name), labels(job, run) | {LABEL_ATTEMPT: str(attempt)}
    if stage.role is Role.DELINK:
        return PodPlan(name, marks, _without_devices(job.spec.phases[stage.index].resources))
    phase = job.spec.phases[stage.index]
    layout = resolve_layout(job.spec, phase)
    rendezvous_id = f"{job.metadata.uid}-{run.phase}-{run.attempt}"
    disk = (phase.offload.volume or {"emptyDir": {}}) if phase.offload.may_use_disk else None
    return PodPlan(name, marks, phase.resources, layout.workers, layout.processes_per_worker, rendezvous_id, disk)


def _without_devices(resources: Resources) -> Resources:
    """A delink copies bytes: it needs the memory of the phase that it leads into, but no GPU."""

    def plain(amounts: dict[str, int | str]) -> dict[str, int | str]:
        return {name: amount for name, amount in amounts.items() if "/" not in name}

    return Resources(limits=plain(resources.limits), requests=plain(resources.requests))


def _object(kind: str, api_version: str, job: PseudoRealJob, run: Run) -> Json:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": run.name(job.metadata.name),
            "namespace": job.metadata.namespace,
            "labels": labels(job, run),
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": KIND,
                    "name": job.metadata.name,
                    "uid": job.metadata.uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
    }


def _config_map(job: PseudoRealJob, stage: Stage, run: Run) -> Json:
    checkpoint = job.spec.checkpoint
    mounted = checkpoint.path if checkpoint.volume else WORK_DIRECTORY
    folder = work_directory(mounted, job.metadata.name, job.metadata.uid)
    make = partial(phase_config, offload_directory=OFFLOAD_DIRECTORY) if stage.role is Role.TRAIN else delink_config
    config = make(job, stage.index, attempt=run.attempt, work_directory=folder)
    return _object("ConfigMap", "v1", job, run) | {"data": {CONFIG_FILE: config.to_json(indent=2)}}


def _service(job: PseudoRealJob, run: Run) -> Json:
    """Gives the pods host names, before they are ready: they become ready by finding one another."""
    marks = (LABEL_JOB_UID, LABEL_PHASE, LABEL_EXECUTION_ATTEMPT, LABEL_ROLE)
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {key: labels(job, run)[key] for key in marks},
        "ports": [{"name": "rendezvous", "port": RENDEZVOUS_PORT, "protocol": "TCP", "targetPort": RENDEZVOUS_PORT}],
    }
    return _object("Service", "v1", job, run) | {"spec": spec}


def _job(job: PseudoRealJob, run: Run, plan: PodPlan, settings: Settings) -> Json:
    manifest = _object("Job", "batch/v1", job, run)
    if job.spec.scheduling.queue:
        manifest["metadata"]["labels"][QUEUE_LABEL] = job.spec.scheduling.queue
    manifest["spec"] = {
        "completionMode": "Indexed",
        "completions": plan.workers,
        "parallelism": plan.workers,
        # One lost worker ends the attempt: the operator restarts all of them together.
        "backoffLimit": 0,
        # A pod that is going away counts as failed only once it is gone.
        "podReplacementPolicy": "Failed",
        "template": pod_template(job, plan, settings),
    }
    return manifest


def identity(manifest: Json) -> tuple[str, str]:
    """(kind, name)."""
    return manifest["kind"], manifest["metadata"]["name"]
