"""A node that rejects pods of a job is excluded for a while, and never forever."""

from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from pseudoreal_api.names import ANNOTATION_EXCLUDES_UNTIL
from pseudoreal_operator import clock
from pseudoreal_operator.manifests.exclusion import EXCLUDED_SECONDS, MOST_EXCLUDED_SECONDS

from tests.unit.operator.lifecycle.support.steps import message, until
from tests.unit.operator.support.world import World, make_job

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def asked(stage: str = "real", **changes: Any) -> World:
    """Return a world in which pods of the stage wait for their containers."""
    world = until(World(make_job(**{"spec__restart": {"backoffSeconds": 10}} | changes)), "real-delink")
    world.finish_all()
    world.settle()
    world.control()
    assert world.active_jobs() == [f"sim-{stage}-e1"]
    return world


def reject(world: World, node: str = "gpu-1") -> None:
    """Let a node reject one pod; the other pods are ended, and the next execution is requested."""
    pod = world.waiting()[0]
    pod["spec"] = pod["spec"] | {"nodeName": node}
    world.reject(pod)
    world.settle()
    world.control()
    world.settle()
    world.control()
    world.wait_out()
    world.settle()


def job_of(world: World) -> dict[str, Any]:
    (name,) = world.active_jobs()
    return world.objects["Job", name]


def excluded(world: World) -> list[str]:
    affinity = job_of(world)["spec"]["template"]["spec"].get("affinity", {}).get("nodeAffinity", {})
    (term,) = affinity.get(REQUIRED, {}).get("nodeSelectorTerms", [{}])
    return [value for field in term.get("matchFields", []) for value in field["values"]]


def test_the_next_execution_stays_away_from_it() -> None:
    world = asked()
    reject(world)
    assert excluded(world) == ["gpu-1"]
    assert (world.status.restarts, world.status.execution) == (0, 2)
    (disruption,) = world.status.disruptions
    assert (disruption.reason, disruption.node) == ("PodRejected", "gpu-1")
    until = clock.from_text(disruption.time) + timedelta(seconds=EXCLUDED_SECONDS)
    assert "ExecutionFailed" in world.events.values()
    assert job_of(world)["metadata"]["annotations"][ANNOTATION_EXCLUDES_UNTIL] >= clock.to_text(until)


def test_the_condition_says_so() -> None:
    world = asked()
    world.reject(world.waiting()[0])
    world.settle()
    world.control()
    world.settle()
    said = message(world, "Progressing")
    assert "was rejected by node node-" in said
    assert "UnexpectedAdmissionError: Pod was rejected: no healthy devices present" in said
    assert "Pods of this job do not go to node node-" in said


def test_a_term_of_the_user_stays_and_holds_beside_it() -> None:
    term = {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}
    affinity = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [term, term]}}}
    world = asked(spec__pod={"template": {"spec": {"affinity": affinity}}})
    reject(world)
    made = job_of(world)["spec"]["template"]["spec"]["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    field = {"key": "metadata.name", "operator": "NotIn", "values": ["gpu-1"]}
    assert made == 2 * [term | {"matchFields": [field]}]


def test_where_there_is_no_other_node_it_is_tried_again() -> None:
    """The cluster has only one node, whose GPU plugin starts late."""
    world = asked()
    reject(world)
    world.control()
    wait = world.plan().requeue_after
    assert wait is not None
    assert wait <= EXCLUDED_SECONDS
    world.tick(EXCLUDED_SECONDS - 1)
    world.settle()
    assert world.status.execution == 2, "the scheduler has its time"
    world.tick(1)
    world.settle()
    for pod in world.orphans():
        world.vanish(pod)
    world.settle()
    assert excluded(world) == []
    assert (world.status.execution, world.status.restarts) == (3, 0)
    assert "NodesReadmitted" in world.events.values()
    assert ANNOTATION_EXCLUDES_UNTIL not in job_of(world)["metadata"]["annotations"]


def test_a_queue_that_holds_the_job_takes_no_time_from_it() -> None:
    world = asked(spec__scheduling={"queue": "gpus"})
    world.queues = True
    reject(world)
    world.tick(5 * EXCLUDED_SECONDS)
    world.settle()
    (held,) = world.held()
    world.admit(held)
    world.control()
    world.settle()
    world.tick(EXCLUDED_SECONDS - 1)
    world.settle()
    assert (world.status.execution, excluded(world)) == (2, ["gpu-1"])


def test_pods_that_got_other_nodes_are_left_alone() -> None:
    world = asked()
    reject(world)
    world.control()
    for pod in world.waiting():
        pod["spec"] = pod["spec"] | {"nodeName": "gpu-2"}
    world.tick(MOST_EXCLUDED_SECONDS)
    world.start_pods()
    world.settle()
    assert world.status.execution == 2


def test_a_sick_node_does_not_spin() -> None:
    """If it is the only node, the attempts are ever further apart."""
    world, tries = asked(), []
    for _ in range(8):
        for _ in range(100):
            world.settle()
            world.control()
            for pod in world.orphans():
                world.vanish(pod)
            if world.active_jobs() and not excluded(world) and world.waiting():
                break
            world.tick(30)
        tries.append(world.now)
        reject(world)
    gaps = [(after - before).total_seconds() for before, after in pairwise(tries)]
    assert all(gap >= 30 for gap in gaps)
    assert min(gaps[-3:]) >= 300
    assert max(gaps) <= MOST_EXCLUDED_SECONDS + 400, "nor is it given up"
    assert world.status.restarts == 0
    assert world.status.avoided_nodes == ["gpu-1"]


def test_several_nodes_are_found_at_once() -> None:
    world = asked()
    for node, pod in enumerate(world.waiting()):
        pod["spec"] = pod["spec"] | {"nodeName": f"gpu-{node}"}
        world.reject(pod)
    world.settle()
    world.control()
    world.settle()
    world.wait_out()
    world.settle()
    assert excluded(world) == ["gpu-0", "gpu-1"]


@pytest.mark.parametrize("times", [1, 2])
def test_a_node_that_loses_containers_is_avoided_as_one_that_evicts(times: int) -> None:
    """A reboot is over when the next pods come, so no node is excluded because of it."""
    world = until(World(make_job(spec__restart={"backoffSeconds": 10, "maxRestarts": 0})), "real")
    for _ in range(times):
        pod = world.alive()[0]
        pod["spec"] = pod["spec"] | {"nodeName": "gpu-1"}
        world.finish(pod, "Failed", exit_code=255, reason="Unknown")
        world.settle()
        world.control()
        world.settle()
        world.wait_out()
        world.settle()
        assert excluded(world) == []
        world.control()
        world.start_pods()
        world.settle()
    assert [fault.reason for fault in world.status.disruptions] == times * ["NodeFailed"]
    assert world.status.avoided_nodes == (["gpu-1"] if times == 2 else [])
    assert world.status.restarts == 0
