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
from pseudoreal_api.spec import PseudoRealJob

from pseudoreal_operator.observe.observed import Run

Json = dict[str, Any]

_RUN_LABELS = (LABEL_JOB_UID, LABEL_PHASE, LABEL_EXECUTION_ATTEMPT, LABEL_ROLE)


def child(kind: str, api_version: str, job: PseudoRealJob, run: Run) -> Json:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": run.name(job.metadata.name),
            "namespace": job.metadata.namespace,
            "labels": labels(job, run),
            "ownerReferences": [owner(job)],
        },
    }


def labels(job: PseudoRealJob, run: Run) -> dict[str, str]:
    return job_labels(job) | {
        LABEL_JOB_UID: job.metadata.uid,
        LABEL_PHASE: run.phase,
        LABEL_EXECUTION_ATTEMPT: str(run.attempt),
        LABEL_ROLE: run.role.value,
    }


def job_labels(job: PseudoRealJob) -> dict[str, str]:
    return {
        "app.kubernetes.io/managed-by": "pseudoreal-operator",
        "app.kubernetes.io/part-of": "pseudoreal",
        LABEL_JOB: job.metadata.name,
    }


def pods_of(job: PseudoRealJob, run: Run) -> dict[str, str]:
    """Selects the pods of one run."""
    return {key: labels(job, run)[key] for key in _RUN_LABELS}


def owner(job: PseudoRealJob) -> Json:
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": job.metadata.name,
        "uid": job.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
