"""Restarts that pods made on their own count as others do, once each, and the execution continues."""

from typing import Any

import pytest
from pseudoreal_api.wire.messages import InPlace
from pseudoreal_operator import clock

from tests.unit.operator.lifecycle.support.steps import (
    condition_message,
    config,
    fail_execution,
    run_pods,
    run_until,
    start_job,
)
from tests.unit.operator.support.world import World

WORDS = "local rank 0 ended without a message"


@pytest.fixture
def world() -> World:
    """A world in which the phase real trains on two pods, each on its own node."""
    return place_on_nodes(run_until(World(start_job().job), "real"))


def place_on_nodes(world: World) -> World:
    for number, pod in enumerate(world.alive()):
        pod["spec"] = {"nodeName": f"node-{number}"}
        world.report(pod, 12)
    world.settle()
    return world


def origin_account(restarts: int = 1, text: str = WORDS) -> InPlace:
    return InPlace(restarts=restarts, peer_lost=False, message=text)


def peer_account(restarts: int = 1) -> InPlace:
    return InPlace(restarts=restarts, peer_lost=True, message="connection closed")


def restart_in_place(world: World, restarts: int = 1, origin: int = 1) -> None:
    """Let both pods report that they have restarted their ranks."""
    for number, pod in enumerate(world.alive()):
        world.report(pod, 10, "starting", origin_account(restarts) if number == origin else peer_account(restarts))
    world.settle()


def test_restart_in_place_is_counted_and_reported_without_touching_pods(world: World) -> None:
    names = [pod["metadata"]["name"] for pod in world.alive()]
    restart_in_place(world)
    status = world.status
    assert (status.restarts, status.execution, status.state) == (1, 1, "Training")
    assert [pod["metadata"]["name"] for pod in world.alive()] == names
    (fault,) = status.faults
    assert (fault.reason, fault.pod, fault.node) == ("PodFailed", names[1], "node-1")
    assert (fault.execution, fault.restart_in_place) == (1, 1)
    assert status.restarts_in_place is not None
    assert (status.restarts_in_place.execution, status.restarts_in_place.restarts) == (1, 1)
    assert status.restarts_in_place.message == f"Pod {names[1]} (worker 1): {WORDS}."
    assert list(world.events.values()).count("RestartedInPlace") == 1
    for pod in world.alive():
        world.report(pod, 11, "computing", origin_account() if pod["metadata"]["name"] == names[1] else peer_account())
    world.settle()
    assert "Its ranks were restarted in place 1 time, the last time for this reason: Pod sim-real" in condition_message(
        world, "Progressing"
    )


def test_restart_in_place_is_counted_once(world: World) -> None:
    restart_in_place(world)
    for _ in range(3):
        # Another operator hears all anew.
        world.reports.clear()
        restart_in_place(world)
    assert world.status.restarts == 1
    restart_in_place(world, 2)
    assert (world.status.restarts, len(world.status.faults)) == (2, 2)
    assert list(world.events.values()).count("RestartedInPlace") == 2


def test_pod_that_waits_to_restart_has_not_restarted(world: World) -> None:
    world.report(world.alive()[1], 0, in_place=origin_account(), ranks=0)
    world.settle()
    assert (world.status.restarts, world.status.restarts_in_place) == (0, None)


def test_restart_is_counted_only_when_its_origin_reports(world: World) -> None:
    first, second = world.alive()
    world.report(first, 10, "starting", peer_account())
    world.settle()
    assert world.status.restarts == 0
    world.report(second, 10, "starting", origin_account())
    world.settle()
    assert [fault.pod for fault in world.status.faults] == [second["metadata"]["name"]]


@pytest.mark.parametrize("reporting", [1, 2])
def test_restart_without_a_report_of_its_origin_blames_no_pod(reporting: int, world: World) -> None:
    for pod in world.alive()[:reporting]:
        world.report(pod, 10, "starting", peer_account())
    world.tick(21)
    world.settle()
    (fault,) = world.status.faults
    assert (fault.reason, fault.pod, fault.restart_in_place) == ("PeerLost", None, 1)


def test_restart_in_place_is_counted_from_termination_messages(world: World) -> None:
    world.reports.clear()
    first, second = world.alive()
    world.finish(second, "Failed", in_place=origin_account(2))
    world.finish(first, "Failed", peer_lost=True, in_place=peer_account(2))
    world.control()
    world.settle()
    faults = [(fault.execution, fault.restart_in_place) for fault in world.status.faults]
    assert faults == [(1, 1), (1, 2), (1, None)], "two in place, and the one that ended the pods"
    assert (world.status.restarts, world.status.execution) == (3, 2)


def test_restarts_in_place_of_a_successful_phase_are_counted(world: World) -> None:
    world.reports.clear()
    first, second = world.alive()
    world.finish(first, in_place=peer_account())
    world.finish(second, in_place=origin_account())
    world.control()
    world.settle()
    assert (world.status.state, world.status.restarts) == ("Complete", 1)
    assert list(world.events.values()).count("RestartedInPlace") == 1


def test_restarts_in_place_are_numbered_per_execution() -> None:
    """All stages have the same execution number."""
    world = place_on_nodes(start_job())
    restart_in_place(world, origin=0)
    assert world.status.restarts == 1
    world.finish_all()
    restart_in_place(place_on_nodes(run_until(world, "real")))
    assert (world.status.restarts, world.status.execution) == (2, 1)


def test_restarts_in_place_lengthen_the_next_backoff(world: World) -> None:
    restart_in_place(world)
    assert world.status.retries is not None
    assert world.status.retries.restarts == 1
    fail_execution(world)
    wait = clock.from_text(world.status.restart_after or "") - world.now
    assert wait.total_seconds() == 20


def test_node_where_restarts_in_place_begin_repeatedly_is_avoided(world: World) -> None:
    restart_in_place(world)
    restart_in_place(world, 2)
    assert world.status.avoided_nodes == ["node-1"]
    assert list(world.events.values()).count("NodeAvoided") == 1


@pytest.mark.parametrize(
    ("restart_spec", "faults", "allowed"),
    [
        ({}, 0, 3),
        ({"maxRestarts": 10}, 0, 3),
        ({"maxRestarts": 10, "inPlace": 5}, 1, 5),
        ({"maxRestarts": 3}, 2, 1),
        ({"maxRestarts": 3}, 3, 0),
        ({"inPlace": 0}, 0, 0),
        ({"maxRestarts": 1, "windowSeconds": 1}, 0, 1),
        ({"rules": [{"onExitCodes": [1], "action": "Fail"}]}, 0, 0),
        ({"rules": [{"onReasons": ["Error"], "action": "RestartIgnoringLimit"}]}, 0, 0),
        ({"rules": [{"onExitCodes": [3], "action": "Fail"}]}, 0, 3),
    ],
)
def test_allowed_restarts_in_place_are_bounded_by_the_restarts_left(
    restart_spec: dict[str, Any], faults: int, allowed: int
) -> None:
    world = start_job(spec__restart=restart_spec)
    for _ in range(faults):
        fail_execution(world)
        world.wait_out()
        run_pods(world)
    (name,) = world.active_jobs()
    assert config(world, name)["inPlace"] == allowed


def test_restarts_in_place_count_against_max_restarts(world: World) -> None:
    for number in (1, 2, 3):
        restart_in_place(world, number)
    assert (world.status.state, world.status.restarts) == ("Training", 3)
    fail_execution(world)
    assert world.status.state == "Failed"
    assert "(used: 3; spec.restart.maxRestarts: 3)" in condition_message(world, "Failed")


def test_waiting_pod_whose_peer_was_deleted_starts_a_new_execution(world: World) -> None:
    gone, left = world.alive()
    world.vanish(gone)
    world.settle()
    assert world.status.execution == 1
    world.report(left, 0, in_place=peer_account(), ranks=0)
    world.settle()
    assert (world.status.execution, world.status.restarts) == (2, 0)
    assert world.orphans(), "it is asked to end"


def test_hang_clocks_start_again_after_a_restart_in_place(world: World) -> None:
    world.tick(800)
    restart_in_place(world)
    world.tick(800)
    assert world.plan().status.execution == 1, "no step for 1600 s, of which half belong to the ranks before"
