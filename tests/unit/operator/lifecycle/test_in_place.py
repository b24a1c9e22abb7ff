"""Restarts that pods made on their own count as others do, once each, and the execution continues."""

from typing import Any

import pytest
from pseudoreal_api.wire.messages import InPlace
from pseudoreal_operator import clock

from tests.unit.operator.lifecycle.support.steps import begun, config, fail_execution, message, run_pods, until
from tests.unit.operator.support.world import World

WORDS = "local rank 0 ended without a word"


@pytest.fixture
def world() -> World:
    """A world in which the phase real trains on two pods, each on its own node."""
    return on_nodes(until(World(begun().job), "real"))


def on_nodes(world: World) -> World:
    for number, pod in enumerate(world.alive()):
        pod["spec"] = {"nodeName": f"node-{number}"}
        world.report(pod, 12)
    world.settle()
    return world


def died(restarts: int = 1, text: str = WORDS) -> InPlace:
    return InPlace(restarts=restarts, peer_lost=False, message=text)


def followed(restarts: int = 1) -> InPlace:
    return InPlace(restarts=restarts, peer_lost=True, message="connection closed")


def restart(world: World, restarts: int = 1, origin: int = 1) -> None:
    """Let both pods report that they have restarted their ranks."""
    for number, pod in enumerate(world.alive()):
        world.report(pod, 10, "starting", died(restarts) if number == origin else followed(restarts))
    world.settle()


def test_a_restart_in_place_is_counted_and_told_and_disturbs_nothing(world: World) -> None:
    names = [pod["metadata"]["name"] for pod in world.alive()]
    restart(world)
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
        world.report(pod, 11, "computing", died() if pod["metadata"]["name"] == names[1] else followed())
    world.settle()
    assert "Its ranks were restarted in place 1 time, the last time as: Pod sim-real" in message(world, "Progressing")


def test_it_is_counted_once_whoever_asks(world: World) -> None:
    restart(world)
    for _ in range(3):
        # Another operator hears all anew.
        world.reports.clear()
        restart(world)
    assert world.status.restarts == 1
    restart(world, 2)
    assert (world.status.restarts, len(world.status.faults)) == (2, 2)
    assert list(world.events.values()).count("RestartedInPlace") == 2


def test_a_pod_that_waits_for_the_others_has_not_restarted(world: World) -> None:
    world.report(world.alive()[1], 0, in_place=died(), ranks=0)
    world.settle()
    assert (world.status.restarts, world.status.restarts_in_place) == (0, None)


def test_a_pod_that_followed_another_one_waits_for_its_word(world: World) -> None:
    first, second = world.alive()
    world.report(first, 10, "starting", followed())
    world.settle()
    assert world.status.restarts == 0
    world.report(second, 10, "starting", died())
    world.settle()
    assert [fault.pod for fault in world.status.faults] == [second["metadata"]["name"]]


@pytest.mark.parametrize("reporting", [1, 2])
def test_where_nobody_says_why_no_pod_is_blamed(reporting: int, world: World) -> None:
    for pod in world.alive()[:reporting]:
        world.report(pod, 10, "starting", followed())
    world.tick(21)
    world.settle()
    (fault,) = world.status.faults
    assert (fault.reason, fault.pod, fault.restart_in_place) == ("PeerLost", None, 1)


def test_termination_messages_count_where_no_report_arrived(world: World) -> None:
    world.reports.clear()
    first, second = world.alive()
    world.finish(second, "Failed", in_place=died(2))
    world.finish(first, "Failed", peer_lost=True, in_place=followed(2))
    world.control()
    world.settle()
    faults = [(fault.execution, fault.restart_in_place) for fault in world.status.faults]
    assert faults == [(1, 1), (1, 2), (1, None)], "two in place, and the one that ended the pods"
    assert (world.status.restarts, world.status.execution) == (3, 2)


def test_a_phase_that_succeeds_tells_of_its_restarts(world: World) -> None:
    world.reports.clear()
    first, second = world.alive()
    world.finish(first, in_place=followed())
    world.finish(second, in_place=died())
    world.control()
    world.settle()
    assert (world.status.state, world.status.restarts) == ("Complete", 1)
    assert list(world.events.values()).count("RestartedInPlace") == 1


def test_each_stage_counts_its_own() -> None:
    """All stages have the same execution number."""
    world = on_nodes(begun())
    restart(world, origin=0)
    assert world.status.restarts == 1
    world.finish_all()
    restart(on_nodes(until(world, "real")))
    assert (world.status.restarts, world.status.execution) == (2, 1)


def test_the_restart_that_makes_pods_anew_waits_longer_after_them(world: World) -> None:
    restart(world)
    assert world.status.retries is not None
    assert world.status.retries.restarts == 1
    fail_execution(world)
    wait = clock.from_text(world.status.restart_after or "") - world.now
    assert wait.total_seconds() == 20


def test_a_node_where_it_begins_again_and_again_is_avoided(world: World) -> None:
    restart(world)
    restart(world, 2)
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
def test_pods_may_restart_as_often_as_is_left(restart_spec: dict[str, Any], faults: int, allowed: int) -> None:
    world = begun(spec__restart=restart_spec)
    for _ in range(faults):
        fail_execution(world)
        world.wait_out()
        run_pods(world)
    (name,) = world.active_jobs()
    assert config(world, name)["inPlace"] == allowed


def test_restarts_in_place_use_up_those_of_the_job(world: World) -> None:
    for number in (1, 2, 3):
        restart(world, number)
    assert (world.status.state, world.status.restarts) == ("Training", 3)
    fail_execution(world)
    assert world.status.state == "Failed"
    assert "That was after 3 restarts, and spec.restart.maxRestarts allows 3" in message(world, "Failed")


def test_a_pod_that_waits_in_vain_for_one_that_is_gone_is_made_anew(world: World) -> None:
    gone, left = world.alive()
    world.vanish(gone)
    world.settle()
    assert world.status.execution == 1
    world.report(left, 0, in_place=followed(), ranks=0)
    world.settle()
    assert (world.status.execution, world.status.restarts) == (2, 0)
    assert world.orphans(), "it is asked to end"


def test_the_clocks_of_a_hang_begin_anew(world: World) -> None:
    world.tick(800)
    restart(world)
    world.tick(800)
    assert world.plan().status.execution == 1, "no step for 1600 s, of which half belong to the ranks before"
