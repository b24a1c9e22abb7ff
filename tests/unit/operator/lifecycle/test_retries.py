"""Each restart waits longer than the previous one, unless there was progress in between, and their number is
bounded."""

from collections.abc import Callable

import pytest
from pseudoreal_api.status.status import CheckpointStatus, Retries
from pseudoreal_operator import clock
from pseudoreal_operator.status.conditions import find

from tests.unit.operator.lifecycle.support.steps import begun, fail_execution, run_pods, until
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


def wait_of(world: World) -> float:
    return (clock.from_text(world.status.restart_after or "") - world.now).total_seconds()


def go_on(world: World) -> None:
    world.wait_out()
    run_pods(world)


def save(world: World, name: str) -> None:
    world.status = world.status.model_copy(update={"checkpoint": CheckpointStatus(latest=name, step=3)})


@pytest.mark.parametrize("end", ENDINGS)
@pytest.mark.parametrize(
    ("first", "waits"), [(10, [10, 20, 40, 80, 160, 300, 300]), (0, [0, 1, 3, 7]), (600, [600, 600])]
)
def test_each_wait_is_longer_than_the_one_before(first: int, waits: list[int], end: Ending) -> None:
    world = begun(spec__restart={"maxRestarts": 999, "backoffSeconds": first})
    for seconds in waits:
        end(world)
        assert wait_of(world) == seconds
        assert seconds == 0 or world.plan().requeue_after == seconds
        go_on(world)


def test_whatever_ends_the_executions_in_turn() -> None:
    world = begun(spec__restart={"backoffSeconds": 10, "maxRestarts": 999})
    waits = []
    for end in ENDINGS:
        end(world)
        waits.append(wait_of(world))
        go_on(world)
    assert waits == [10, 20, 40, 80]
    assert world.status.retries == Retries(restarts=4, disruptions=3)


@pytest.mark.parametrize("end", ENDINGS)
def test_after_a_new_checkpoint_the_wait_is_short_again(end: Ending) -> None:
    world = begun(spec__restart={"maxRestarts": 999, "backoffSeconds": 10})
    waits = []
    for name in ("pseudo-1", "pseudo-1", "pseudo-2", "pseudo-2"):
        save(world, name)
        end(world)
        waits.append(wait_of(world))
        go_on(world)
    assert waits == [10, 20, 10, 20]


def test_a_checkpoint_that_only_a_termination_message_tells_of_is_progress() -> None:
    world = begun(spec__restart={"backoffSeconds": 10})
    preempt(world)
    go_on(world)
    # It has saved, and says so.
    fail_execution(world, outcome="Yielded")
    assert wait_of(world) == 10


def test_a_user_who_resumes_or_asks_again_does_not_wait_for_what_was_before() -> None:
    world = begun(spec__restart={"backoffSeconds": 10})
    for _ in range(3):
        preempt(world)
        go_on(world)
    world.set(suspend=True)
    world.settle()
    for pod in world.orphans():
        world.vanish(pod)
    world.set(suspend=False)
    go_on(world)
    preempt(world)
    assert wait_of(world) == 10


def failed(world: World) -> tuple[str, str]:
    condition = find(world.status, "Failed")
    return (condition.reason, condition.message) if condition else ("", "")


@pytest.mark.parametrize("end", [preempt, evict, delete_job])
def test_disruptions_without_progress_have_a_bound(end: Ending) -> None:
    world = until(World(make_job(spec__restart={"maxDisruptions": 3})), "real")
    for _ in range(3):
        end(world)
        assert failed(world) == ("", "")
        go_on(world)
    end(world)
    reason, message = failed(world)
    assert reason == "RestartsExhausted"
    assert "after 3 restarts that do not count, without a new checkpoint between them" in message
    assert "spec.restart.maxDisruptions allows 3" in message
    assert f"continueFrom: sim-{UID[:8]}" in message


def test_disruptions_with_progress_between_have_none() -> None:
    world = begun(spec__restart={"maxDisruptions": 1})
    for number in range(5):
        save(world, f"pseudo-{number}")
        preempt(world)
        go_on(world)
    assert failed(world) == ("", "")


def test_what_never_ends_by_itself_ends_by_default() -> None:
    """For instance an offload volume that fills its node: the kubelet evicts the pod wherever it runs."""
    world = begun()
    world.status = world.status.model_copy(update={"retries": Retries(restarts=999, disruptions=999)})
    for reason in ("", "RestartsExhausted"):
        evict(world)
        assert failed(world)[0] == reason
        go_on(world)


def test_a_node_that_evicts_again_and_again_is_avoided() -> None:
    world = begun(spec__restart={"avoidNodesAfter": 3})
    for avoided in ([], [], ["full"]):
        assert world.status.avoided_nodes == []
        evict(world)
        assert world.status.avoided_nodes == avoided
        go_on(world)
    assert (world.status.restarts, world.status.faults) == (0, [])
    assert list(world.events.values()).count("NodeAvoided") == 1


def test_faults_and_evictions_of_a_node_add_up() -> None:
    world = begun()
    evict(world)
    go_on(world)
    world.alive()[0]["spec"] = {"nodeName": "full"}
    fail(world)
    assert world.status.avoided_nodes == ["full"]


@pytest.mark.parametrize("why", ["PreemptionByScheduler", "EvictionByEvictionAPI"])
def test_a_node_is_not_to_blame_for_who_wants_it_or_drains_it(why: str) -> None:
    world = begun()
    for _ in range(4):
        disrupt(world, why)
        go_on(world)
    assert world.status.avoided_nodes == []


def test_a_status_of_an_earlier_release_has_none_of_it() -> None:
    world = begun(spec__restart={"backoffSeconds": 10})
    old = {k: v for k, v in world.status.to_dict().items() if k not in ("retries", "disruptions")}
    world.status = type(world.status).model_validate(old)
    preempt(world)
    assert wait_of(world) == 10
