"""Phases that continue with fewer workers if there is no room for all, and get them back."""

from datetime import timedelta
from typing import Any

import pytest
from pseudoreal_operator import clock

from tests.unit.operator.lifecycle.support.steps import (
    condition_message,
    condition_states,
    config,
    fail_execution,
    run_until,
    settle_without_orphans,
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


def elastic_world(nodes: int | None = None, **changes: Any) -> World:
    """Return a world whose second phase has at most four workers, with its first execution requested."""
    options = {name: value for name, value in changes.items() if name.startswith("spec__")}
    phase = PHASE | {name: value for name, value in changes.items() if not name.startswith("spec__")}
    world = run_until(World(make_job(spec__phases__1=phase, **options), nodes=1), "real-delink")
    world.nodes = nodes
    world.finish_all()
    run_for(world)
    return world


def run_for(world: World, seconds: float = 0) -> World:
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


def trainer_config(world: World) -> dict[str, Any]:
    (name,) = world.active_jobs()
    return config(world, name)


def size(world: World) -> tuple[int, int]:
    """Return the workers and micro-batches of the newest execution, as its pods are told."""
    found = trainer_config(world)
    return found["workers"], found["batch"]["microBatches"]


def test_elastic_phase_starts_with_the_workers_that_have_nodes() -> None:
    world = elastic_world(nodes=2)
    assert condition_states(world)["Progressing"] == ("True", "Starting")
    run_for(world, PATIENCE - 1)
    assert (world.status.execution, size(world)) == (1, (4, 2))
    run_for(world, 1)
    assert (world.status.execution, size(world)) == (2, (2, 4))
    assert condition_states(world)["Progressing"] == ("True", "Training")
    assert "It has 2 of 4 workers: 2 of 4 pods had a node after 100 s." in condition_message(world, "Progressing")
    found = world.status.elastic
    assert found
    assert (found.phase_name, found.workers) == ("real", 2)
    assert (world.status.restarts, world.status.faults, world.status.retries) == (0, [], None), "it is no fault"
    assert (world.status.replicas.desired, list(world.events.values()).count("Resized")) == (2, 1)
    world.finish_all()
    world.run_fairly()
    assert (world.status.state, world.status.phases[1].step, world.status.elastic) == ("Complete", 20, None)


def test_batch_of_a_step_does_not_depend_on_the_number_of_workers() -> None:
    world = run_for(elastic_world(nodes=1), PATIENCE)
    found = trainer_config(world)
    assert (found["workers"], found["batch"]) == (1, {"sequences": 24, "microBatches": 8})


def test_elastic_phase_uses_only_numbers_of_workers_that_the_layout_allows() -> None:
    world = run_for(elastic_world(3, elastic=PHASE["elastic"] | {"minWorkers": 2}, parallelism=IN_PAIRS), PATIENCE)
    assert size(world)[0] == 2


def test_elastic_phase_waits_if_fewer_than_min_workers_have_nodes() -> None:
    world = elastic_world(nodes=1, elastic={"minWorkers": 2, "patienceSeconds": PATIENCE})
    run_for(world, 5 * PATIENCE)
    assert world.status.execution == 1
    assert (world.plan().requeue_after or 1) > 0, "it does not look without a pause"


def test_phase_without_elastic_waits_for_all_workers() -> None:
    world = elastic_world(nodes=3, elastic=None, spec__deadlines={"startupSeconds": 101 * PATIENCE})
    assert run_for(world, 100 * PATIENCE).status.execution == 1


def test_scale_down_comes_at_startup_seconds_if_patience_is_longer() -> None:
    """Otherwise the phase would request as many workers again."""
    world = run_for(elastic_world(nodes=2, spec__deadlines={"startupSeconds": 30}), 30)
    assert (world.status.execution, size(world)[0], world.status.retries) == (2, 2, None)


def test_elastic_phase_continues_without_a_removed_node() -> None:
    world = elastic_world(nodes=4)
    assert world.status.elastic is None
    world.nodes = 3
    world.disrupt(world.alive()[3], "DeletionByTaintManager")
    world.settle()
    world.control()
    world.settle()
    world.wait_out()
    run_for(world)
    assert size(world)[0] == 4, "another node may be there"
    run_for(world, PATIENCE)
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


def test_pods_on_an_unreachable_node_are_abandoned_after_patience() -> None:
    world = elastic_world(nodes=4)
    lose_one(world)
    (left,) = world.alive()
    leaves = clock.from_text(left["metadata"]["deletionTimestamp"])
    world.now = leaves + timedelta(seconds=15 + PATIENCE - 1)
    run_for(world)
    assert (world.status.execution, condition_states(world)["Progressing"]) == (2, ("False", "AwaitingCleanup"))
    run_for(world, 1)
    assert (world.status.execution, world.status.abandoned_execution, size(world)[0]) == (3, 1, 3)
    assert left in world.alive(), "the pod is still there"
    assert (world.status.restarts, condition_states(world)["Progressing"]) == (0, ("True", "Training"))
    world.finish_all()
    world.run_fairly()
    assert world.status.state == "Complete"


def test_requeue_comes_when_patience_ends() -> None:
    """No event wakes the operator at that time."""
    world = elastic_world(nodes=2)
    assert world.plan().requeue_after == PATIENCE
    run_for(world, PATIENCE)
    assert world.plan().requeue_after == GROWTH
    world = elastic_world(nodes=4)
    assert world.plan().requeue_after is None
    lose_one(world)
    run_for(world, 50)
    leaves = clock.from_text(world.alive()[0]["metadata"]["deletionTimestamp"])
    assert world.plan().requeue_after == (leaves - world.now).total_seconds() + 15 + PATIENCE


def test_execution_with_all_pods_stuck_is_not_abandoned() -> None:
    """If no pod of an execution is known to have ended, its pods may train, so a second execution must not begin."""
    world = elastic_world(nodes=4)
    for pod in world.alive():
        world.lose(pod)
    world.tick(50)
    world.settle()
    run_for(world, 100 * PATIENCE)
    assert (world.status.elastic, len(world.alive())) == (None, 4)


def test_larger_execution_waits_for_pods_that_may_still_run() -> None:
    """Even though the larger execution would not need their nodes."""
    world = run_for(elastic_world(nodes=2), PATIENCE)
    run_for(world, GROWTH - 1)
    for pod in world.alive():
        world.lose(pod)
    world.nodes = 2
    run_for(world, 1)
    assert world.status.execution == 3
    run_for(world, 100 * PATIENCE)
    assert (world.status.execution, world.active_jobs()) == (3, [])
    world.vanish(world.alive()[0])
    run_for(world)
    assert (world.status.execution, world.status.abandoned_execution, size(world)[0]) == (4, 2, 3)


def wait_for_scale_up(world: World) -> None:
    """Advance to the time at which more workers are tried, which is in the status."""
    assert world.status.elastic
    assert world.status.elastic.grow_after
    world.now = clock.from_text(world.status.elastic.grow_after)
    run_for(world)


def test_elastic_phase_scales_up_when_there_is_room() -> None:
    world = run_for(elastic_world(nodes=2), PATIENCE)
    world.nodes = 4
    run_for(world, GROWTH - 1)
    assert world.status.execution == 2, "not yet"
    run_for(world, 1)
    assert (world.status.execution, size(world), world.status.elastic) == (3, (4, 2), None)
    assert (world.status.restarts, list(world.events.values()).count("Resized")) == (0, 2)


def test_failed_scale_ups_cost_at_most_a_tenth_of_the_time() -> None:
    world = run_for(elastic_world(nodes=2), PATIENCE)
    began, waits = world.now, []
    for _ in range(5):
        before = world.now
        wait_for_scale_up(world)
        waits.append((world.now - before).total_seconds())
        assert (size(world)[0], condition_states(world)["Progressing"][0]) == (4, "True")
        run_for(world, PATIENCE)
        assert size(world)[0] == 2
    assert waits[0] == GROWTH
    assert all(waits[number] >= sum(waits[:number]) for number in range(5)), waits
    spent = (world.now - began).total_seconds()
    assert spent - sum(waits) <= spent / 10


def test_scale_up_keeps_as_many_workers_as_get_nodes() -> None:
    world = run_for(elastic_world(nodes=1), PATIENCE)
    world.nodes = 3
    wait_for_scale_up(world)
    run_for(world, PATIENCE)
    assert size(world)[0] == 3


def test_scale_up_needs_a_phase_that_trains() -> None:
    """A phase that has not started to train has nothing to save."""
    world = run_for(elastic_world(nodes=2), PATIENCE)
    for pod in world.alive():
        world.report(pod, 0, "starting")
    run_for(world, GROWTH)
    assert world.status.execution == 2
    for pod in world.alive():
        world.report(pod, 11)
    world.settle()
    assert world.status.execution == 3


def test_restart_after_a_fault_keeps_the_number_of_workers() -> None:
    world = run_for(elastic_world(nodes=2), PATIENCE)
    fail_execution(world)
    world.settle()
    world.wait_out()
    run_for(world)
    assert (world.status.execution, world.status.restarts, size(world)) == (3, 1, (2, 4))


def test_resumed_job_starts_with_all_workers() -> None:
    world = run_for(elastic_world(nodes=2), PATIENCE)
    world.set(suspend=True)
    settle_without_orphans(world)
    world.set(suspend=False)
    run_for(world)
    assert (size(world)[0], world.status.elastic) == (4, None)


QUEUE = {"spec__scheduling": {"queue": "gpus"}}


def queued_world() -> World:
    """Return a world in which a queue holds the Job of the elastic phase."""
    world = run_until(World(make_job(spec__phases__1=PHASE, **QUEUE)), "real-delink")
    world.queues = True
    world.finish_all()
    return run_for(world)


def test_queued_elastic_phase_requests_fewer_workers_after_patience() -> None:
    world, sizes = queued_world(), []
    for _ in range(5):
        sizes.append(size(world)[0])
        run_for(world, PATIENCE)
    assert sizes == [4, 3, 2, 1, 1]
    assert world.status.restarts == 0
    (name,) = world.held()
    world.admit(name)
    run_for(world)
    found = world.status.elastic
    assert found
    assert (condition_states(world)["Progressing"], found.grow_after) == (("True", "Training"), None)
    run_for(world, 100 * GROWTH)
    assert size(world)[0] == 1, "it does not give back what the queue has admitted"


def test_gang_without_nodes_scales_down_step_by_step() -> None:
    world = elastic_world(nodes=0, spec__scheduling={"gang": {"policy": "SchedulerPlugins"}})
    groups = []
    for _ in range(3):
        group = next(body for (kind, _), body in reversed(world.objects.items()) if kind == "PodGroup")
        groups.append((group["spec"]["minMember"], size(world)[0]))
        run_for(world, PATIENCE)
    assert groups == [(4, 4), (3, 3), (2, 2)]


@pytest.mark.parametrize("effects", range(5))
def test_resize_survives_a_crash_of_the_operator_at_each_request(effects: int) -> None:
    world = elastic_world(nodes=2)
    world.tick(PATIENCE)
    for _ in range(6):
        world.carry_out(world.plan(), effects)
    run_for(world)
    assert (world.status.execution, size(world)[0]) == (2, 2)


def test_number_of_workers_is_read_from_the_job_after_a_lost_status() -> None:
    world = run_for(elastic_world(nodes=2), PATIENCE)
    world.status = world.status.model_copy(update={"elastic": None})
    world.settle()
    assert (world.status.execution, world.status.replicas.desired) == (2, 2)
