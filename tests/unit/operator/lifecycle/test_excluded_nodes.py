"""A node that rejects pods of a job is excluded for a while, and never forever."""

from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from pseudoreal_api.names import ANNOTATION_EXCLUDES_UNTIL
from pseudoreal_operator import clock
from pseudoreal_operator.manifests.exclusion import EXCLUDED_SECONDS, MOST_EXCLUDED_SECONDS

from tests.unit.operator.lifecycle.support.steps import condition_message, run_until
from tests.unit.operator.support.world import World, make_job

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def world_with_requested_pods(stage: str = "real", **changes: Any) -> World:
    """Return a world in which pods of the stage wait for their containers."""
    world = run_until(World(make_job(**{"spec__restart": {"backoffSeconds": 10}} | changes)), "real-delink")
    world.finish_all()
    world.settle()
    world.control()
    assert world.active_jobs() == [f"sim-{stage}-e1"]
    return world


def reject_pod(world: World, node: str = "gpu-1") -> None:
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


def newest_job(world: World) -> dict[str, Any]:
    (name,) = world.active_jobs()
    return world.objects["Job", name]


def excluded_nodes(world: World) -> list[str]:
    affinity = newest_job(world)["spec"]["template"]["spec"].get("affinity", {}).get("nodeAffinity", {})
    (term,) = affinity.get(REQUIRED, {}).get("nodeSelectorTerms", [{}])
    return [value for field in term.get("matchFields", []) for value in field["values"]]


def test_next_execution_excludes_the_node_that_rejected_a_pod() -> None:
    world = world_with_requested_pods()
    reject_pod(world)
    assert excluded_nodes(world) == ["gpu-1"]
    assert (world.status.restarts, world.status.execution) == (0, 2)
    (disruption,) = world.status.disruptions
    assert (disruption.reason, disruption.node) == ("PodRejected", "gpu-1")
    run_until = clock.from_text(disruption.time) + timedelta(seconds=EXCLUDED_SECONDS)
    assert "ExecutionFailed" in world.events.values()
    assert newest_job(world)["metadata"]["annotations"][ANNOTATION_EXCLUDES_UNTIL] >= clock.to_text(run_until)


def test_condition_names_the_excluded_node() -> None:
    world = world_with_requested_pods()
    world.reject(world.waiting()[0])
    world.settle()
    world.control()
    world.settle()
    said = condition_message(world, "Progressing")
    assert "was rejected by node node-" in said
    assert "UnexpectedAdmissionError: Pod was rejected: no healthy devices present" in said
    assert "Pods of this job do not go to node node-" in said


def test_exclusion_is_added_to_the_users_affinity_terms() -> None:
    term = {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}
    affinity = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [term, term]}}}
    world = world_with_requested_pods(spec__pod={"template": {"spec": {"affinity": affinity}}})
    reject_pod(world)
    made = newest_job(world)["spec"]["template"]["spec"]["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    field = {"key": "metadata.name", "operator": "NotIn", "values": ["gpu-1"]}
    assert made == 2 * [term | {"matchFields": [field]}]


def test_excluded_node_is_readmitted_if_there_is_no_other() -> None:
    """The cluster has only one node, whose GPU plugin starts late."""
    world = world_with_requested_pods()
    reject_pod(world)
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
    assert excluded_nodes(world) == []
    assert (world.status.execution, world.status.restarts) == (3, 0)
    assert "NodesReadmitted" in world.events.values()
    assert ANNOTATION_EXCLUDES_UNTIL not in newest_job(world)["metadata"]["annotations"]


def test_time_in_the_queue_does_not_shorten_the_search_for_other_nodes() -> None:
    world = world_with_requested_pods(spec__scheduling={"queue": "gpus"})
    world.queues = True
    reject_pod(world)
    world.tick(5 * EXCLUDED_SECONDS)
    world.settle()
    (held,) = world.held()
    world.admit(held)
    world.control()
    world.settle()
    world.tick(EXCLUDED_SECONDS - 1)
    world.settle()
    assert (world.status.execution, excluded_nodes(world)) == (2, ["gpu-1"])


def test_pods_with_other_nodes_are_not_restarted_when_the_exclusion_ends() -> None:
    world = world_with_requested_pods()
    reject_pod(world)
    world.control()
    for pod in world.waiting():
        pod["spec"] = pod["spec"] | {"nodeName": "gpu-2"}
    world.tick(MOST_EXCLUDED_SECONDS)
    world.start_pods()
    world.settle()
    assert world.status.execution == 2


def test_retries_on_the_only_node_get_further_apart() -> None:
    """If it is the only node, the attempts are ever further apart."""
    world, tries = world_with_requested_pods(), []
    for _ in range(8):
        for _ in range(100):
            world.settle()
            world.control()
            for pod in world.orphans():
                world.vanish(pod)
            if world.active_jobs() and not excluded_nodes(world) and world.waiting():
                break
            world.tick(30)
        tries.append(world.now)
        reject_pod(world)
    gaps = [(after - before).total_seconds() for before, after in pairwise(tries)]
    assert all(gap >= 30 for gap in gaps)
    assert min(gaps[-3:]) >= 300
    assert max(gaps) <= MOST_EXCLUDED_SECONDS + 400, "nor is it given up"
    assert world.status.restarts == 0
    assert world.status.avoided_nodes == ["gpu-1"]


def test_several_nodes_that_reject_pods_at_once_are_excluded() -> None:
    world = world_with_requested_pods()
    for node, pod in enumerate(world.waiting()):
        pod["spec"] = pod["spec"] | {"nodeName": f"gpu-{node}"}
        world.reject(pod)
    world.settle()
    world.control()
    world.settle()
    world.wait_out()
    world.settle()
    assert excluded_nodes(world) == ["gpu-0", "gpu-1"]


@pytest.mark.parametrize("times", [1, 2])
def test_node_that_loses_containers_is_avoided(times: int) -> None:
    """A reboot is over when the next pods come, so no node is excluded because of it."""
    world = run_until(World(make_job(spec__restart={"backoffSeconds": 10, "maxRestarts": 0})), "real")
    for _ in range(times):
        pod = world.alive()[0]
        pod["spec"] = pod["spec"] | {"nodeName": "gpu-1"}
        world.finish(pod, "Failed", exit_code=255, reason="Unknown")
        world.settle()
        world.control()
        world.settle()
        world.wait_out()
        world.settle()
        assert excluded_nodes(world) == []
        world.control()
        world.start_pods()
        world.settle()
    assert [fault.reason for fault in world.status.disruptions] == times * ["NodeFailed"]
    assert world.status.avoided_nodes == (["gpu-1"] if times == 2 else [])
    assert world.status.restarts == 0
