"""Time in a queue is nobody's fault: every clock of ours stands still, and then goes on where it was."""

from collections.abc import Callable
from typing import Any

import pytest
from pseudoreal_operator import clock
from pseudoreal_operator.status.conditions import find

from tests.unit.operator.lifecycle.steps import begun, claims
from tests.unit.operator.world import World, make_job

HOURS = 5 * 3600
QUEUE = {"spec__scheduling": {"queue": "gpus"}}


def look(world: World) -> None:
    world.settle()
    world.control()
    world.settle()


def why_failed(world: World) -> str:
    found = find(world.status, "Failed")
    return found.reason if found else ""


def delink_in_queue(**changes: Any) -> World:
    """Phase pseudo is done, and a queue holds the Job that delinks."""
    world = begun(**QUEUE, **changes)
    world.queues = True
    world.finish_all()
    look(world)
    assert world.held() == ["sim-real-delink-e1"]
    return world


def test_a_delink_that_waits_in_a_queue_does_not_fail() -> None:
    world = delink_in_queue()
    world.tick(HOURS)
    look(world)
    assert (why_failed(world), claims(world)["Progressing"]) == ("", ("False", "Queued"))
    assert (world.plan().wake_after or 1) > 0, "it does not look without a pause"
    world.admit("sim-real-delink-e1")
    world.control()
    world.start_pods()
    world.settle()
    world.tick(1799)
    world.settle()
    assert why_failed(world) == ""
    world.tick(1)
    world.settle()
    assert why_failed(world) == "DelinkTimeout", "its own clock runs"


def test_a_rolled_back_delink_is_not_the_answer_to_a_queue_either() -> None:
    world = delink_in_queue(spec__delink={"onTimeout": "RollBack"})
    world.tick(HOURS)
    look(world)
    assert world.status.execution == 1


def test_the_clock_stands_still_and_goes_on_where_it_was() -> None:
    world = begun(**QUEUE, spec__deadlines={"activeSeconds": 1000})
    world.tick(400)
    world.hold("sim-pseudo-e1")
    look(world)
    world.tick(HOURS)
    look(world)
    assert why_failed(world) == ""
    world.admit("sim-pseudo-e1")
    world.control()
    world.start_pods()
    world.settle()
    world.tick(599)
    world.settle()
    assert why_failed(world) == ""
    world.tick(1)
    world.settle()
    assert why_failed(world) == "DeadlineExceeded"


def test_pods_that_a_queue_takes_back_do_not_hang() -> None:
    world = begun(**QUEUE, spec__hang={"stepSeconds": 100})
    (pod,) = world.alive()
    world.report(pod, 3)
    world.hold("sim-pseudo-e1")
    world.tick(101)
    world.settle()
    assert (world.status.restarts, world.status.execution) == (0, 1)


def away(_: World) -> None:
    """The operator sees nothing of it."""


@pytest.mark.parametrize("glance", [look, away])
def test_startup_has_its_time_after_the_queue(glance: Callable[[World], None]) -> None:
    world = World(make_job(**QUEUE, spec__deadlines={"startupSeconds": 60, "activeSeconds": 200}), queues=True)
    world.settle()
    world.control()
    glance(world)
    world.tick(HOURS)
    glance(world)
    world.admit("sim-pseudo-e1")
    world.control()
    world.tick(59)
    world.settle()
    assert why_failed(world) == ""
    world.tick(1)
    world.settle()
    assert why_failed(world) == "StartupDeadlineExceeded"


@pytest.mark.parametrize("glance", [look, away])
def test_an_operator_that_was_away_gives_the_time_back(glance: Callable[[World], None]) -> None:
    world = delink_in_queue()
    glance(world)
    world.tick(HOURS)
    world.admit("sim-real-delink-e1")
    world.control()
    world.start_pods()
    world.tick(1000)
    world.settle()
    assert why_failed(world) == ""
    world.tick(801)
    world.settle()
    assert why_failed(world) == "DelinkTimeout"


def test_each_hold_is_added_once() -> None:
    world = begun(**QUEUE, spec__deadlines={"activeSeconds": 1000})
    started = clock.from_text(world.status.active_since or "")
    for _ in range(3):
        world.hold("sim-pseudo-e1")
        look(world)
        world.tick(50)
        world.admit("sim-pseudo-e1")
        look(world)
        world.start_pods()
        world.tick(10)
        look(world)
    assert (clock.from_text(world.status.active_since or "") - started).total_seconds() == 150
    assert world.status.queued_since is None
