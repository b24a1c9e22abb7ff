"""Kueue's label on the job itself names its queue, as on a job of any other kind."""

from typing import Any

import pytest
from pseudoreal_api.spec.check import InvalidJob, check_job
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_operator.loop.planning_thread import SpecCache

from tests.support.jobs import good_job
from tests.unit.operator.lifecycle.support.steps import condition_message
from tests.unit.operator.support.world import UID, World

LABEL = "kueue.x-k8s.io/queue-name"
COPY = {"kueue.x-k8s.io/multikueue-origin": "multikueue"}


def labelled(labels: dict[str, str], generation: int = 1, **changes: Any) -> dict[str, Any]:
    body = good_job("sim", **changes)
    body["metadata"] |= {"namespace": "default", "uid": UID, "generation": generation, "labels": labels}
    return body


def child_job(world: World) -> dict[str, Any]:
    world.settle()
    (found,) = world.jobs_list()
    return found


@pytest.mark.parametrize(
    ("labels", "scheduling", "queue"),
    [
        ({LABEL: "gpus"}, {}, "gpus"),
        ({LABEL: "gpus"}, {"queue": "gpus"}, "gpus"),
        ({LABEL: ""}, {}, None),
        ({LABEL: "gpus"} | COPY, {}, None),
        ({LABEL: "gpus"} | COPY, {"queue": "cpus"}, "cpus"),
        ({}, {}, None),
    ],
)
def test_label_names_the_queue(labels: dict[str, str], scheduling: dict[str, Any], queue: str | None) -> None:
    body = labelled(labels, spec__scheduling=scheduling)
    assert check_job(body).spec.scheduling.queue == queue
    made = child_job(World(PseudoRealJob.from_object(body), queues=True))
    assert made["metadata"]["labels"].get(LABEL) == queue
    assert made["spec"].get("suspend", False) is (queue is not None)


PRIORITY = "kueue.x-k8s.io/priority-class"


@pytest.mark.parametrize(
    ("labels", "scheduling", "priority"),
    [
        ({LABEL: "gpus", PRIORITY: "urgent"}, {}, "urgent"),
        ({PRIORITY: "urgent"}, {"queue": "gpus"}, "urgent"),
        ({LABEL: "gpus", PRIORITY: "urgent"}, {"queue": "gpus", "workloadPriorityClassName": "low"}, "low"),
        ({LABEL: "gpus", PRIORITY: ""}, {}, None),
        ({PRIORITY: "urgent"}, {}, None),  # without a queue, Kueue does not read it
        ({LABEL: "gpus", PRIORITY: "urgent"} | COPY, {}, None),
    ],
)
def test_label_names_the_priority_in_the_queue(
    labels: dict[str, str], scheduling: dict[str, Any], priority: str | None
) -> None:
    body = labelled(labels, spec__scheduling=scheduling)
    check_job(body)
    made = child_job(World(PseudoRealJob.from_object(body), queues=True))
    assert made["metadata"]["labels"].get(PRIORITY) == priority


def test_two_queues_are_refused_with_both_names() -> None:
    body = labelled({LABEL: "gpus"}, spec__scheduling={"queue": "cpus"})
    says = f"spec.scheduling.queue is cpus, and the job's label {LABEL} says gpus; keep one of them"
    with pytest.raises(InvalidJob, match=says):
        check_job(body)
    world = World(PseudoRealJob.from_object(body))
    world.settle()
    assert condition_message(world, "Accepted") == says
    assert world.jobs_list() == []


def test_label_that_is_changed_later_fails_no_job() -> None:
    """The spec comes first, once the job is accepted."""
    world = World(PseudoRealJob.from_object(labelled({LABEL: "cpus"}, spec__scheduling={"queue": "cpus"})))
    child_job(world)
    world.job = PseudoRealJob.from_object(labelled({LABEL: "gpus"}, spec__scheduling={"queue": "cpus"}))
    world.settle()
    assert world.status.state != "Failed"


def test_change_of_the_label_is_seen_although_the_generation_stays() -> None:
    cache = SpecCache()
    queues = [cache.parse(labelled({LABEL: name})).spec.scheduling.queue for name in ("a", "b", "", "a")]
    assert queues == ["a", "b", None, "a"]
    priorities = [
        cache.parse(labelled({LABEL: "a", PRIORITY: name})).spec.scheduling.workload_priority_class_name
        for name in ("low", "high")
    ]
    assert priorities == ["low", "high"]
