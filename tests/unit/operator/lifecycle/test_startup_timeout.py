"""If not all pods run in time, all are released and requested again: running pods hold resources that others wait
for."""

from typing import Any

import pytest
from pseudoreal_api.wire.messages import InPlace
from pseudoreal_operator import clock

from tests.unit.operator.lifecycle.support.steps import condition_message, condition_states, run_pods, run_until
from tests.unit.operator.support.world import UID, World, make_job

DEADLINE: dict[str, Any] = {"spec__deadlines": {"startupSeconds": 60}}


def half_placed_world(**changes: Any) -> World:
    """Return a world in which only the first of the two pods of the phase real has a node."""
    world = run_until(World(make_job(**(DEADLINE | changes))), "real-delink")
    world.finish_all()
    world.settle()
    world.control()
    place_one(world)
    return world


def place_one(world: World) -> None:
    world.control()
    first = world.alive()[0]
    first["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    world.settle()


def wait_for_timeout(world: World) -> float:
    """Let the deadline pass; return the seconds until the pods are requested again."""
    world.tick(60)
    world.settle()
    return (clock.from_text(world.status.restart_after or "") - world.now).total_seconds()


def end_pods(world: World) -> None:
    for pod in world.orphans():
        world.vanish(pod)
    world.settle()


def test_half_placed_job_releases_its_pods_and_retries() -> None:
    world = half_placed_world()
    world.tick(59)
    world.settle()
    assert (world.status.execution, len(world.alive())) == (1, 2)
    world.tick(1)
    world.settle()
    assert (world.status.execution, world.status.restarts, world.status.faults) == (2, 0, [])
    assert condition_states(world)["Progressing"] == ("False", "Restarting")
    assert "1 of 2 pods ran 60 s after their creation" in condition_message(world, "Progressing")
    assert world.active_jobs() == [], "its pods hold nothing any more"
    end_pods(world)
    world.wait_out()
    run_pods(world)
    assert (world.active_jobs(), world.status.state) == (["sim-real-e2"], "Training")


def test_startup_timeouts_back_off_until_a_new_checkpoint() -> None:
    world, waits = half_placed_world(), []
    for _ in range(7):
        waits.append(wait_for_timeout(world))
        end_pods(world)
        world.wait_out()
        world.settle()
        place_one(world)
    for seconds, first in zip(waits, (10, 20, 40, 80, 160, 300, 300), strict=True):
        assert first <= seconds <= 2 * first, "it doubles, and is spread"
    assert world.status.retries
    assert world.status.retries.disruptions == 7


def test_retries_of_two_competing_jobs_have_different_jitter() -> None:
    def waits(uid: str) -> list[float]:
        world, found = half_placed_world(), []
        world.job = world.job.model_copy(update={"metadata": world.job.metadata.model_copy(update={"uid": uid})})
        for _ in range(5):
            found.append(wait_for_timeout(world))
            end_pods(world)
            world.wait_out()
            world.settle()
            place_one(world)
        return found

    # The world's pods belong to a job of that uid.
    one = waits(UID)
    assert one == waits(UID), "a pass that is made again decides the same"
    spread = {seconds - base for seconds, base in zip(one, (10, 20, 40, 80, 160), strict=True)}
    assert len(spread) > 1


def test_startup_timeout_fails_the_job_if_on_startup_timeout_is_fail() -> None:
    world = half_placed_world(spec__deadlines={"startupSeconds": 60, "onStartupTimeout": "Fail"})
    world.tick(60)
    world.settle()
    assert condition_states(world)["Failed"] == ("True", "StartupDeadlineExceeded")


def test_startup_timeouts_are_bounded_by_max_disruptions() -> None:
    world = half_placed_world(spec__restart={"maxDisruptions": 2})
    for _ in range(3):
        world.tick(60)
        world.settle()
        if world.status.completion_time:
            break
        end_pods(world)
        world.wait_out()
        world.settle()
        place_one(world)
    assert condition_states(world)["Failed"] == ("True", "RestartsExhausted")


def test_default_startup_timeout_is_one_hour() -> None:
    """One image that cannot be pulled would hold all other nodes forever."""
    world = half_placed_world(spec__deadlines={})
    world.tick(3599)
    world.settle()
    assert world.status.execution == 1
    world.tick(1)
    world.settle()
    assert (world.status.execution, world.status.restarts) == (2, 0)
    assert "1 of 2 pods ran 3600 s after their creation" in condition_message(world, "Progressing")


@pytest.mark.parametrize("changes", [{"spec__deadlines": {"startupSeconds": 2**31}}, DEADLINE], ids=str)
def test_job_with_all_pods_or_a_long_limit_keeps_its_pods(changes: dict[str, Any]) -> None:
    world = half_placed_world(**changes)
    if changes == DEADLINE:
        world.start_pods()
    world.tick(5 * 3600)
    world.settle()
    assert world.status.execution == 1


def test_losing_a_worker_after_the_startup_deadline_is_no_startup_timeout() -> None:
    """The pods ran in time and trained; the loss of one is decided by the rules about missing workers."""
    world = run_until(World(make_job(**DEADLINE)), "real")
    for pod in world.alive():
        world.report(pod, 12)
    world.settle()
    world.tick(3600)
    for pod in world.alive():
        world.report(pod, 13)
    world.settle()
    survivor, lost = world.alive()
    world.vanish(lost)
    world.settle()
    assert (world.status.execution, world.status.state) == (1, "Training")
    # The survivor loses the connection, and its ranks end: the execution ends because of the missing worker.
    world.report(survivor, 0, in_place=InPlace(restarts=1, peer_lost=True, message="connection closed"), ranks=0)
    world.settle()
    assert world.status.execution == 2
    assert "pods ran" not in condition_message(world, "Progressing")
