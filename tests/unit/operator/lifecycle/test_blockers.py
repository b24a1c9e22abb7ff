"""Blockers: why pods do not start, and what the job has to do with it."""

from typing import Any

import pytest
from pseudoreal_operator.lifecycle.blockers import describe_blocker, why_queued
from pseudoreal_operator.observe.reading import read_pod
from pseudoreal_operator.observe.stages import Execution, StageKind
from pseudoreal_operator.observe.view import ChildJob, JobState, Pod, Pods


def pending_pod(**status: Any) -> Pod:
    labels = {"pseudoreal.dev/phase": "real", "pseudoreal.dev/stage": "train", "pseudoreal.dev/execution": "3"}
    return read_pod({"metadata": {"name": "p", "labels": labels}, "status": {"phase": "Pending", **status}})


@pytest.mark.parametrize(
    ("status", "reason", "says"),
    [
        (
            {
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no gpu"}
                ]
            },
            "Unschedulable",
            "free or add the resources that the scheduler misses",
        ),
        (
            {"containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": "ImagePullBackOff"}}}]},
            "ImagePullBackOff",
            "correct spec.pod.image",
        ),
        (
            {
                "containerStatuses": [
                    {
                        "name": "trainer",
                        "state": {"waiting": {"reason": "CreateContainerConfigError", "message": "no x"}},
                    }
                ]
            },
            "CreateContainerConfigError",
            "no x",
        ),
        (
            {"initContainerStatuses": [{"name": "i", "state": {"waiting": {"reason": "ErrImagePull"}}}]},
            "ErrImagePull",
            "access to the registry",
        ),
    ],
)
def test_blocker_says_what_to_do(status: dict[str, Any], reason: str, says: str) -> None:
    found = describe_blocker(Pods([pending_pod(**status)]))
    assert found
    assert found.reason == reason
    assert says in found.message
    assert "kubectl describe pod p" in found.message


def test_creation_of_containers_is_no_blocker() -> None:
    waiting = [{"name": "trainer", "state": {"waiting": {"reason": "ContainerCreating"}}}]
    scheduled = [{"type": "PodScheduled", "status": "True"}]
    assert describe_blocker(Pods([pending_pod(containerStatuses=waiting, conditions=scheduled)])) is None


def test_reason_of_a_queued_job_names_its_queue_and_workload() -> None:
    job = ChildJob("the-job", Execution("real", StageKind.TRAIN, 3), JobState.ACTIVE, queued=True, uid="0f1e")
    assert "until queue gpus admits it" in why_queued(job, "gpus")
    assert "job-uid=0f1e" in why_queued(job, "gpus")
    assert "a queue that spec.scheduling.queue does not name" in why_queued(job, None)
