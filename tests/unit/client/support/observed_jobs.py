"""A job on a cluster, as input for tests of the client's views: two phases, of which the second trains on two pods."""

from datetime import UTC, datetime
from typing import Any

from pseudoreal.observed_job import ObservedJob
from pseudoreal_api.names import CONTAINER

from tests.support.jobs import good_job

Json = dict[str, Any]

NOW = datetime(2030, 1, 1, 12, 0, tzinfo=UTC)
UID = "0a1b2c3d-0000-4000-8000-000000000000"


def at(minutes: float) -> str:
    """Return the time `minutes` before NOW."""
    moment = datetime.fromtimestamp(NOW.timestamp() - 60 * minutes, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(kind: str, status: str, reason: str, message: str) -> Json:
    told = {"type": kind, "status": status, "reason": reason, "message": message}
    return told | {"lastTransitionTime": at(5), "observedGeneration": 1}


TRAINING: Json = {
    "state": "Training",
    "currentPhase": "real",
    "execution": 2,
    "restarts": 1,
    "startTime": at(90),
    "replicas": {"desired": 2, "ready": 2, "failed": 0},
    "progress": {
        "step": 15,
        "totalSteps": 20,
        "percent": 75,
        "phaseRemainingSeconds": 100,
        "tokens": 3840,
        "loss": "3.2500",
        "validationLoss": "3.5000",
        "tokensPerSecond": "12.8",
        "lastUpdatedTime": at(0.5),
    },
    "checkpoint": {"latest": "real-14", "step": 14, "savedTime": at(2)},
    "faults": [{"execution": 1, "time": at(30), "reason": "PodFailed", "pod": "llm-real-abcdef-e1-1", "node": "gpu-7"}],
    "phases": [
        {
            "name": "pseudo",
            "state": "Complete",
            "startTime": at(90),
            "completionTime": at(50),
            "endCheckpoint": "pseudo-10",
            "step": 10,
            "tokens": 2560,
            "loss": "4.2500",
            "validationLoss": "4.5000",
        },
        {"name": "real", "state": "Training", "startTime": at(45), "startCheckpoint": "real-10"},
    ],
    "conditions": [
        condition("Accepted", "True", "Valid", "The job can run."),
        condition("Progressing", "True", "Training", "Execution 2 at phase real is training."),
        condition("Suspended", "False", "NotRequested", "spec.suspend is false."),
    ],
}

UNSCHEDULABLE: Json = {
    "phase": "Pending",
    "conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available."}
    ],
}


def body(status: Json | None = None, **changes: Any) -> Json:
    made = good_job("llm", **changes)
    made["metadata"] |= {"namespace": "team", "uid": UID, "creationTimestamp": at(91), "resourceVersion": "7"}
    return made | ({"status": status} if status else {})


def job(status: Json | None = None, **changes: Any) -> ObservedJob:
    return ObservedJob(body(status, **changes))


def pod(index: int, *, phase: str = "real", execution: int = 2, stage: str = "train", **settings: Any) -> Json:
    """Return a running pod on node gpu-INDEX. `settings` may override node, status and uid."""
    name = f"llm-{phase}-abcdef-e{execution}-{index}"
    labels = {
        "pseudoreal.dev/job-name": "llm",
        "pseudoreal.dev/job-uid": settings.get("uid", UID),
        "pseudoreal.dev/phase": phase,
        "pseudoreal.dev/execution": str(execution),
        "pseudoreal.dev/stage": stage,
    }
    return {
        "metadata": {
            "name": name,
            "namespace": "team",
            "labels": labels,
            "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
            "ownerReferences": [{"kind": "Job", "name": name[:-2], "uid": "1", "controller": True}],
        },
        "spec": {"nodeName": settings.get("node", f"gpu-{index}")},
        "status": settings.get("status") or running(),
    }


def running() -> Json:
    return {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [{"name": CONTAINER, "state": {"running": {"startedAt": at(10)}}}],
    }
