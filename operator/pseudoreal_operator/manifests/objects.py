"""What all children of a job have in common: names, labels, the owner. Pure."""

from typing import Any

from pseudoreal_api.base import API_VERSION, KIND
from pseudoreal_api.names import (
    LABEL_EXECUTION_ATTEMPT,
    LABEL_JOB,
    LABEL_JOB_UID,
    LABEL_PHASE,
    LABEL_ROLE,
)
from pseudoreal_api.spec.job import PseudoRealJob

from pseudoreal_operator.observe.stages import Execution, StageKind

Json = dict[str, Any]


def child(kind: str, api_version: str, job: PseudoRealJob, name: str, labels: dict[str, str]) -> Json:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": job.metadata.namespace,
            "labels": labels,
            "ownerReferences": [owner(job)],
        },
    }


def execution_labels(job: PseudoRealJob, execution: Execution) -> dict[str, str]:
    """Labels of the Job and the pods of one execution."""
    return own_labels(job) | {
        LABEL_PHASE: execution.phase,
        LABEL_EXECUTION_ATTEMPT: str(execution.number),
        LABEL_ROLE: execution.kind.value,
    }


def own_labels(job: PseudoRealJob) -> dict[str, str]:
    """Labels of what belongs to this job, and not to a later one of its name."""
    return job_labels(job) | {LABEL_JOB_UID: job.metadata.uid}


def job_labels(job: PseudoRealJob) -> dict[str, str]:
    return {
        "app.kubernetes.io/managed-by": "pseudoreal-operator",
        "app.kubernetes.io/part-of": "pseudoreal",
        LABEL_JOB: job.metadata.name,
    }


def training_pods(job: PseudoRealJob) -> dict[str, str]:
    """Selects the training pods of all executions: never two of them run at once, and the rendezvous keeps those that
    linger out."""
    return {LABEL_JOB_UID: job.metadata.uid, LABEL_ROLE: StageKind.TRAIN.value}


def owner(job: PseudoRealJob) -> Json:
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": job.metadata.name,
        "uid": job.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
