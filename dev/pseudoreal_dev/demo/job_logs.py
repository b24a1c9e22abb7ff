"""Reads the log events of a job's trainer pods."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pseudoreal_api.names import LABEL_JOB, LABEL_STAGE

from pseudoreal_dev.cluster.kubectl import Kubernetes

Event = dict[str, Any]


def events(kubernetes: Kubernetes, job: str, namespace: str) -> list[Event]:
    """Return the structured log lines of rank 0 of all executions and phases, oldest pod first."""
    pods = kubernetes.items("pods", f"--namespace={namespace}", f"--selector={LABEL_JOB}={job}")
    first = [pod for pod in pods if _is_rank_0(pod) and pod["metadata"]["labels"].get(LABEL_STAGE) == "train"]
    ordered = sorted(first, key=lambda pod: pod["metadata"]["creationTimestamp"])
    return [event for pod in ordered for event in _parse(_log(kubernetes, pod["metadata"]["name"], namespace))]


def named(found: Sequence[Event], name: str) -> list[Event]:
    return [event for event in found if event.get("event") == name]


def _is_rank_0(pod: dict[str, Any]) -> bool:
    return bool(pod["metadata"].get("annotations", {}).get("batch.kubernetes.io/job-completion-index") == "0")


def _log(kubernetes: Kubernetes, pod: str, namespace: str) -> str:
    return kubernetes.run("logs", pod, f"--namespace={namespace}", "--tail=-1")


def _parse(log: str) -> Iterator[Event]:
    for line in log.splitlines():
        if line.startswith("{"):
            try:
                event = json.loads(line)
            except ValueError:
                continue
            yield event
