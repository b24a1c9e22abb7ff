"""Phases that continue with fewer workers if there is no room for all, and get them back."""

from datetime import timedelta
from typing import Any

import pytest
from pseudoreal_operator import clock

from tests.unit.operator.lifecycle.support.steps import (
    claims,
    config,
    fail_execution,
    message,
    settle_without_orphans,
    until,
)
from tests.unit.operator.support.world import World, make_job

PATIENCE = 100
GROWTH = 10 * PATIENCE
PHASE: dict[str, Any] = {
    "name": "real",
    "until": {"step": 20},
    "workers": 4,
    "elastic": {"minWorkers": 1, "patienceSeconds": PATIENCE},
    "batch": {"sequences": 24, "microBatches": 2},
    "parallelism": {"stateSharding": "Full"},
}
IN_PAIRS = {"replicas": 2, "stateSharding": "Full"}


def elastic(nodes: int | None = None, **changes: Any) -> World:
    """Return a world whose second phase has at most four workers, with its first execution requested."""
    options = {name: value for name, value in changes.items() if name.startswith("spec__")}
    phase = PHASE | {name: value for name, value in changes.items() if not name.startswith("spec__")}
    world = until(World(make_job(spec__phases__1=phase, **options), nodes=1), "real-delink")
    world.nodes = nodes
    world.finish_all()
    go_on(world)
    return world


def go_on(world: World, seconds: float = 0) -> World:
    """Let some time pass, create and start the requested pods where there is room, and make passes."""
    world.tick(seconds)
    for _ in range(2):
        world.settle()
        for pod in [pod for pod in world.orphans() if "lost" not in pod]:
            world.vanish(pod)
        world.settle()
        world.control()
        world.start_pods()
    world.settle()
    return world


def told(world: World) -> dict[str, Any]:
    (name,) = world.active_jobs()
    return config(world, name)


def size(world: World) -> tuple[int, int]:
    """Return the workers and micro-batches of the newest execution, as its pods are told."""
    found = told(world)
    return found["workers"], found["batch"]["microBatches"]


def test_a_phase_starts_with_what_it_gets() -> None:
    world = elastic(nodes=2)
    assert claims(world)["Progressing"] == ("True", "Starting")
    go_on(world, PATIENCE - 1)
    assert (world.status.execution, size(world)) == (1, (4, 2))
    go_on(world, 1)
    assert (world.status.execution, size(world)) == (2, (2, 4))
    assert claims(world)["Progressing"] == ("True", "Training")
    assert "It has 2 of 4 workers: 2 of 4 pods had a node after 100 s." in message(world, "Progressing")
    found = world.status.elastic
    assert found
    assert (found.phase_name, found.workers) == ("real", 2)
    assert (world.status.restarts, world.status.faults, world.status.retries) == (0, [], None), "it is no fault"
    assert (world.status.replicas.desired, list(world.events.values()).count("Resized")) == (2, 1)
    world.finish_all()
    world.run_fairly()
    assert (world.status.state, world.status.phases[1].step, world.status.elastic) == ("Complete", 20, None)


def test_the_batch_of_a_step_stays_the_same() -> None:
    world = go_on(elastic(nodes=1), PATIENCE)
    found = told(world)
    assert (found["workers"], found["batch"]) == (1, {"sequences": 24, "microBatches": 8})


def test_numbers_that_the_layout_does_not_divide_into_are_left_out() -> None:
    world = go_on(elastic(3, elastic=PHASE["elastic"] | {"minWorkers": 2}, parallelism=IN_PAIRS), PATIENCE)
    assert size(world)[0] == 2


def test_where_not_even_the_least_fits_the_phase_waits() -> None:
    world = elastic(nodes=1, elastic={"minWorkers": 2, "patienceSeconds": PATIENCE})
    go_on(world, 5 * PATIENCE)
    assert world.status.execution == 1
    assert (world.plan().requeue_after or 1) > 0, "it does not look without a pause"


def test_without_the_wish_a_phase_waits_for_all() -> None:
    world = elastic(nodes=3, elastic=None, spec__deadlines={"startupSeconds": 101 * PATIENCE})
    assert go_on(world, 100 * PATIENCE).status.execution == 1


def test_a_shorter_deadline_of_the_start_ends_the_patience() -> None:
    """Otherwise the phase would request as many workers again."""
    world = go_on(elastic(nodes=2, spec__deadlines={"startupSeconds": 30}), 30)
    assert (world.status.execution, size(world)[0], world.status.retries) == (2, 2, None)


def test_a_lost_node_that_is_removed_is_done_without() -> None:
    world = elastic(nodes=4)
    assert world.status.elastic is None
    world.nodes = 3
    world.disrupt(world.alive()[3], "DeletionByTaintManager")
    world.settle()
    world.control()
    world.settle()
    world.wait_out()
    go_on(world)
    assert size(world)[0] == 4, "another node may be there"
    go_on(world, PATIENCE)
    assert size(world)[0] == 3
    assert world.status.restarts == 0


def lose_one(world: World) -> None:
    """Cut off the node of the last pod; the other pods end."""
    world.nodes = (world.nodes or 4) - 1
    world.lose(world.alive()[-1])
    for pod in world.alive()[:-1]:
        world.finish(pod, "Failed", peer_lost=True)
    world.control()
    world.tick(50)
    world.settle()


def test_a_pod_on_a_lost_node_is_waited_for_no_longer_than_patience() -> None:
    world = elastic(nodes=4)
    lose_one(world)
    (left,) = world.alive()
    leaves = clock.from_text(left["metadata"]["deletionTimestamp"])
    world.now = leaves + timedelta(seconds=15 + PATIENCE - 1)
    go_on(world)
    assert (world.status.execution, claims(world)["Progressing"]) == (2, ("False", "AwaitingCleanup"))
    go_on(world, 1)
    assert (world.status.execution, world.status.abandoned_execution, size(world)[0]) == (3, 1, 3)
    assert left in world.alive(), "the pod is still there"
    assert (world.status.restarts, claims(world)["Progressing"]) == (0, ("True", "Training"))
    world.finish_all()
    world.run_fairly()
    assert world.status.state == "Complete"


def test_the_operator_looks_again_when_its_patience_ends() -> None:
    """No event wakes the operator at that time."""
    world = elastic(nodes=2)
    assert world.plan().requeue_after == PATIENCE
    go_on(world, PATIENCE)
    assert world.plan().requeue_after == GROWTH
    world = elastic(nodes=4)
    assert world.plan().requeue_after is None
    lose_one(world)
    go_on(world, 50)
    leaves = clock.from_text(world.alive()[0]["metadata"]["deletionTimestamp"])
    assert world.plan().requeue_after == (leaves - world.now).total_seconds() + 15 + PATIENCE


def test_pods_that_all_may_still_run_are_waited_for() -> None:
    """If no pod of an execution is known to have ended, its pods may train, so a second execution must not begin."""
    world = elastic(nodes=4)
    for pod in world.alive():
        world.lose(pod)
    world.tick(50)
    world.settle()
    go_on(world, 100 * PATIENCE)
    assert (world.status.elastic, len(world.alive())) == (None, 4)


def test_they_are_waited_for_by_a_larger_execution_too() -> None:
    """Even though the larger execution would not need their nodes."""
    world = go_on(elastic(nodes=2), PATIENCE)
    go_on(world, GROWTH - 1)
    for pod in world.alive():
        world.lose(pod)
    world.nodes = 2
    go_on(world, 1)
    assert world.status.execution == 3
    go_on(world, 100 * PATIENCE)
    assert (world.status.execution, world.active_jobs()) == (3, [])
    world.vanish(world.alive()[0])
    go_on(world)
    assert (world.status.execution, world.status.abandoned_execution, size(world)[0]) == (4, 2, 3)


def grow(world: World) -> None:
    """Advance to the time at which more workers are tried, which is in the status."""
    assert world.status.elastic
    assert world.status.elastic.grow_after
    world.now = clock.from_text(world.status.elastic.grow_after)
    go_on(world)


def test_the_workers_come_back_when_there_is_room() -> None:
    world = go_on(elastic(nodes=2), PATIENCE)
    world.nodes = 4
    go_on(world, GROWTH - 1)
    assert world.status.execution == 2, "not yet"
    go_on(world, 1)
    assert (world.status.execution, size(world), world.status.elastic) == (3, (4, 2), None)
    assert (world.status.restarts, list(world.events.values()).count("Resized")) == (0, 2)


def test_tries_in_vain_cost_a_tenth_of_the_time_at_most() -> None:
    world = go_on(elastic(nodes=2), PATIENCE)
    began, waits = world.now, []
    for _ in range(5):
        before = world.now
        grow(world)
        waits.append((world.now - before).total_seconds())
        assert (size(world)[0], claims(world)["Progressing"][0]) == (4, "True")
        go_on(world, PATIENCE)
        assert size(world)[0] == 2
    assert waits[0] == GROWTH
    assert all(waits[number] >= sum(waits[:number]) for number in range(5)), waits
    spent = (world.now - began).total_seconds()
    assert spent - sum(waits) <= spent / 10


def test_a_part_of_the_room_is_taken_too() -> None:
    world = go_on(elastic(nodes=1), PATIENCE)
    world.nodes = 3
    grow(world)
    go_on(world, PATIENCE)
    assert size(world)[0] == 3


def test_more_are_tried_only_where_the_phase_trains() -> None:
    """A phase that has not started to train has nothing to save."""
    world = go_on(elastic(nodes=2), PATIENCE)
    for pod in world.alive():
        world.report(pod, 0, "starting")
    go_on(world, GROWTH)
    assert world.status.execution == 2
    for pod in world.alive():
        world.report(pod, 11)
    world.settle()
    assert world.status.execution == 3


def test_a_fault_keeps_the_number_of_workers() -> None:
    world = go_on(elastic(nodes=2), PATIENCE)
    fail_execution(world)
    world.settle()
    world.wait_out()
    go_on(world)
    assert (world.status.execution, world.status.restarts, size(world)) == (3, 1, (2, 4))


def test_a_resumed_job_tries_all_workers() -> None:
    world = go_on(elastic(nodes=2), PATIENCE)
    world.set(suspend=True)
    settle_without_orphans(world)
    world.set(suspend=False)
    go_on(world)
    assert (size(world)[0], world.status.elastic) == (4, None)


QUEUE = {"spec__scheduling": {"queue": "gpus"}}


def queued() -> World:
    """Return a world in which a queue holds the Job of the elastic phase."""
    world = until(World(make_job(spec__phases__1=PHASE, **QUEUE)), "real-delink")
    world.queues = True
    world.finish_all()
    return go_on(world)


def test_a_queue_is_asked_for_less() -> None:
    world, sizes = queued(), []
    for _ in range(5):
        sizes.append(size(world)[0])
        go_on(world, PATIENCE)
    assert sizes == [4, 3, 2, 1, 1]
    assert world.status.restarts == 0
    (name,) = world.held()
    world.admit(name)
    go_on(world)
    found = world.status.elastic
    assert found
    assert (claims(world)["Progressing"], found.grow_after) == (("True", "Training"), None)
    go_on(world, 100 * GROWTH)
    assert size(world)[0] == 1, "it does not give back what the queue has admitted"


def test_a_gang_that_gets_no_nodes_becomes_smaller_step_by_step() -> None:
    world = elastic(nodes=0, spec__scheduling={"gang": {"policy": "SchedulerPlugins"}})
    groups = []
    for _ in range(3):
        group = next(body for (kind, _), body in reversed(world.objects.items()) if kind == "PodGroup")
        groups.append((group["spec"]["minMember"], size(world)[0]))
        go_on(world, PATIENCE)
    assert groups == [(4, 4), (3, 3), (2, 2)]


@pytest.mark.parametrize("effects", range(5))
def test_an_operator_that_dies_while_it_resizes_loses_nothing(effects: int) -> None:
    world = elastic(nodes=2)
    world.tick(PATIENCE)
    for _ in range(6):
        world.carry_out(world.plan(), effects)
    go_on(world)
    assert (world.status.execution, size(world)[0]) == (2, 2)


def test_a_status_that_is_lost_is_read_from_the_job() -> None:
    world = go_on(elastic(nodes=2), PATIENCE)
    world.status = world.status.model_copy(update={"elastic": None})
    world.settle()
    assert (world.status.execution, world.status.replicas.desired) == (2, 2)
