"""Each restart waits longer than the previous one, unless there was progress in between, and their number is
bounded."""

from collections.abc import Callable

import pytest
from pseudoreal_api.status.status import CheckpointStatus, Retries
from pseudoreal_operator import clock
from pseudoreal_operator.status.conditions import find

from tests.unit.operator.lifecycle.support.steps import fail_execution, run_pods, run_until, start_job
from tests.unit.operator.support.world import UID, World, make_job

Ending = Callable[[World], None]


def fail(world: World) -> None:
    fail_execution(world)


def disrupt(world: World, why: str, node: str = "full") -> None:
    pod = world.alive()[0]
    pod["spec"] = {"nodeName": node}
    world.disrupt(pod, why)
    if world.alive():
        world.carry_out(world.plan())
    world.control()
    world.carry_out(world.plan())


def preempt(world: World) -> None:
    disrupt(world, "PreemptionByScheduler")


def evict(world: World) -> None:
    """Let the kubelet evict a pod, because it needs the pod's disk."""
    disrupt(world, "TerminationByKubelet")


def delete_job(world: World) -> None:
    world.objects.pop(("Job", world.active_jobs()[0]))
    for pod in world.orphans():
        world.vanish(pod)
    world.carry_out(world.plan())


ENDINGS: list[Ending] = [fail, preempt, evict, delete_job]


def backoff_of(world: World) -> float:
    return (clock.from_text(world.status.restart_after or "") - world.now).total_seconds()


def start_next_execution(world: World) -> None:
    world.wait_out()
    run_pods(world)


def save(world: World, name: str) -> None:
    world.status = world.status.model_copy(update={"checkpoint": CheckpointStatus(latest=name, step=3)})


@pytest.mark.parametrize("end", ENDINGS)
@pytest.mark.parametrize(
    ("first", "waits"), [(10, [10, 20, 40, 80, 160, 300, 300]), (0, [0, 1, 3, 7]), (600, [600, 600])]
)
def test_each_backoff_is_longer_than_the_previous_one(first: int, waits: list[int], end: Ending) -> None:
    world = start_job(spec__restart={"maxRestarts": 999, "backoffSeconds": first})
    for seconds in waits:
        end(world)
        assert backoff_of(world) == seconds
        assert seconds == 0 or world.plan().requeue_after == seconds
        start_next_execution(world)


def test_backoff_grows_across_different_causes() -> None:
    world = start_job(spec__restart={"backoffSeconds": 10, "maxRestarts": 999})
    waits = []
    for end in ENDINGS:
        end(world)
        waits.append(backoff_of(world))
        start_next_execution(world)
    assert waits == [10, 20, 40, 80]
    assert world.status.retries == Retries(restarts=4, disruptions=3)


@pytest.mark.parametrize("end", ENDINGS)
def test_new_checkpoint_resets_the_backoff(end: Ending) -> None:
    world = start_job(spec__restart={"maxRestarts": 999, "backoffSeconds": 10})
    waits = []
    for name in ("pseudo-1", "pseudo-1", "pseudo-2", "pseudo-2"):
        save(world, name)
        end(world)
        waits.append(backoff_of(world))
        start_next_execution(world)
    assert waits == [10, 20, 10, 20]


def test_checkpoint_in_a_termination_message_resets_the_backoff() -> None:
    world = start_job(spec__restart={"backoffSeconds": 10})
    preempt(world)
    start_next_execution(world)
    # It has saved, and says so.
    fail_execution(world, outcome="Yielded")
    assert backoff_of(world) == 10


def test_resume_and_repeat_reset_the_backoff() -> None:
    world = start_job(spec__restart={"backoffSeconds": 10})
    for _ in range(3):
        preempt(world)
        start_next_execution(world)
    world.set(suspend=True)
    world.settle()
    for pod in world.orphans():
        world.vanish(pod)
    world.set(suspend=False)
    start_next_execution(world)
    preempt(world)
    assert backoff_of(world) == 10


def failure(world: World) -> tuple[str, str]:
    condition = find(world.status, "Failed")
    return (condition.reason, condition.message) if condition else ("", "")


@pytest.mark.parametrize("end", [preempt, evict, delete_job])
def test_disruptions_without_a_new_checkpoint_are_bounded(end: Ending) -> None:
    world = run_until(World(make_job(spec__restart={"maxDisruptions": 3})), "real")
    for _ in range(3):
        end(world)
        assert failure(world) == ("", "")
        start_next_execution(world)
    end(world)
    reason, message = failure(world)
    assert reason == "RestartsExhausted"
    assert "after disruptions, without a new checkpoint between them: 3;" in message
    assert "spec.restart.maxDisruptions: 3" in message
    assert f"continueFrom: sim-{UID[:8]}" in message


def test_disruptions_with_new_checkpoints_are_unbounded() -> None:
    world = start_job(spec__restart={"maxDisruptions": 1})
    for number in range(5):
        save(world, f"pseudo-{number}")
        preempt(world)
        start_next_execution(world)
    assert failure(world) == ("", "")


def test_endless_disruptions_fail_the_job_by_default() -> None:
    """For instance an offload volume that fills its node: the kubelet evicts the pod wherever it runs."""
    world = start_job()
    world.status = world.status.model_copy(update={"retries": Retries(restarts=999, disruptions=999)})
    for reason in ("", "RestartsExhausted"):
        evict(world)
        assert failure(world)[0] == reason
        start_next_execution(world)


def test_node_that_evicts_repeatedly_is_avoided() -> None:
    world = start_job(spec__restart={"avoidNodesAfter": 3})
    for avoided in ([], [], ["full"]):
        assert world.status.avoided_nodes == []
        evict(world)
        assert world.status.avoided_nodes == avoided
        start_next_execution(world)
    assert (world.status.restarts, world.status.faults) == (0, [])
    assert list(world.events.values()).count("NodeAvoided") == 1


def test_faults_and_evictions_of_a_node_add_up() -> None:
    world = start_job()
    evict(world)
    start_next_execution(world)
    world.alive()[0]["spec"] = {"nodeName": "full"}
    fail(world)
    assert world.status.avoided_nodes == ["full"]


@pytest.mark.parametrize("why", ["PreemptionByScheduler", "EvictionByEvictionAPI"])
def test_preemption_and_draining_do_not_count_against_a_node(why: str) -> None:
    world = start_job()
    for _ in range(4):
        disrupt(world, why)
        start_next_execution(world)
    assert world.status.avoided_nodes == []


def test_status_of_an_earlier_release_has_no_retries() -> None:
    world = start_job(spec__restart={"backoffSeconds": 10})
    old = {k: v for k, v in world.status.to_dict().items() if k not in ("retries", "disruptions")}
    world.status = type(world.status).model_validate(old)
    preempt(world)
    assert backoff_of(world) == 10
