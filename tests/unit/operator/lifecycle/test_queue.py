"""Time in a queue is not counted: every clock of the job stands still, and then continues where it was."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pseudoreal_api.spec.pod import Scheduling
from pseudoreal_operator import clock
from pseudoreal_operator.lifecycle.plan import plan
from pseudoreal_operator.status.conditions import find

from tests.unit.operator.lifecycle.support.steps import (
    condition_message,
    condition_states,
    run_pods,
    run_until,
    start_job,
)
from tests.unit.operator.support.world import SETTINGS, World, make_job

HOURS = 5 * 3600
QUEUE = {"spec__scheduling": {"queue": "gpus", "queueDelink": True}}


def make_passes(world: World) -> None:
    world.settle()
    world.control()
    world.settle()


def why_failed(world: World) -> str:
    found = find(world.status, "Failed")
    return found.reason if found else ""


def delink_in_queue(**changes: Any) -> World:
    """Return a world in which the phase pseudo is done, and a queue holds the Job of the delink."""
    world = start_job(**QUEUE, **changes)
    world.queues = True
    world.finish_all()
    make_passes(world)
    assert world.held() == ["sim-real-delink-e1"]
    return world


def test_a_delink_that_waits_in_a_queue_does_not_fail() -> None:
    world = delink_in_queue()
    world.tick(HOURS)
    make_passes(world)
    assert (why_failed(world), condition_states(world)["Progressing"]) == ("", ("False", "Queued"))
    assert (world.plan().requeue_after or 1) > 0, "it does not look without a pause"
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


def test_queued_delink_does_not_roll_back() -> None:
    world = delink_in_queue(spec__delink={"onTimeout": "RollBack"})
    world.tick(HOURS)
    make_passes(world)
    assert world.status.execution == 1


def test_delink_timeout_pauses_while_queued() -> None:
    world = start_job(**QUEUE, spec__deadlines={"activeSeconds": 1000})
    world.tick(400)
    world.hold("sim-pseudo-e1")
    make_passes(world)
    world.tick(HOURS)
    make_passes(world)
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
    world = start_job(**QUEUE, spec__hang={"stepSeconds": 100})
    (pod,) = world.alive()
    world.report(pod, 3)
    world.hold("sim-pseudo-e1")
    world.tick(101)
    world.settle()
    assert (world.status.restarts, world.status.execution) == (0, 1)


def miss_the_hold(_: World) -> None:
    """The operator makes no pass."""


@pytest.mark.parametrize("glance", [make_passes, miss_the_hold])
def test_startup_deadline_counts_from_admission(glance: Callable[[World], None]) -> None:
    world = World(
        make_job(**QUEUE, spec__deadlines={"startupSeconds": 60, "onStartupTimeout": "Fail", "activeSeconds": 200}),
        queues=True,
    )
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


@pytest.mark.parametrize("glance", [make_passes, miss_the_hold])
def test_time_in_the_queue_is_added_even_if_the_operator_was_away(glance: Callable[[World], None]) -> None:
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


def test_each_hold_moves_the_clocks_once() -> None:
    world = start_job(**QUEUE, spec__deadlines={"activeSeconds": 1000})
    started = clock.from_text(world.status.active_since or "")
    for _ in range(3):
        world.hold("sim-pseudo-e1")
        make_passes(world)
        world.tick(50)
        world.admit("sim-pseudo-e1")
        make_passes(world)
        world.start_pods()
        world.tick(10)
        make_passes(world)
    assert (clock.from_text(world.status.active_since or "") - started).total_seconds() == 150
    assert world.status.queued_since is None


def queued_world() -> World:
    """Return a world in which a queue holds the Job of the first phase, which was never admitted."""
    world = World(make_job(**QUEUE), queues=True)
    world.settle()
    make_passes(world)
    return world


def test_queued_job_names_its_queue_and_how_to_see_why() -> None:
    world = queued_world()
    assert (world.status.state, condition_states(world)["Progressing"]) == ("Queued", ("False", "Queued"))
    assert "until queue gpus admits it" in condition_message(world, "Progressing")
    assert "kubectl describe workloads.kueue.x-k8s.io -l kueue.x-k8s.io/job-uid=" in condition_message(
        world, "Progressing"
    )
    assert "Preempted" not in world.events.values(), "it had nothing that was taken back"


def test_operator_never_changes_suspend_of_a_created_job() -> None:
    """The operator sets whether a Job is suspended only at its creation; afterwards this is left to the queue."""
    world = queued_world()
    for _ in range(3):
        wanted = world.plan()
        assert [manifest["kind"] for manifest in wanted.apply] == []
        world.admit("sim-pseudo-e1")
        make_passes(world)
        world.start_pods()
        make_passes(world)
        world.hold("sim-pseudo-e1")
        make_passes(world)
    assert world.active_jobs() == ["sim-pseudo-e1"], "it stays the queue's"


def preempt(world: World, *outcomes: Any) -> None:
    """Let a queue take the pods of the running execution back; each pod ends with its outcome."""
    name = world.active_jobs()[0]
    world.hold(name)
    world.settle()
    for pod, outcome in zip(world.alive(), outcomes, strict=True):
        world.finish(pod, outcome, peer_lost=outcome == "Failed")
    make_passes(world)
    for pod in [*world.pods.values()]:
        if "deletionTimestamp" in pod["metadata"]:
            world.vanish(pod)
    make_passes(world)


@pytest.mark.parametrize("outcomes", [("Yielded", "Yielded"), ("Yielded", "Failed"), ("Failed", "Failed")])
def test_preempted_execution_continues_without_counting_a_restart(outcomes: tuple[Any, ...]) -> None:
    world = run_until(World(make_job(**QUEUE, spec__restart={"maxRestarts": 0})), "real")
    world.settle()
    before = world.status
    preempt(world, *outcomes)
    assert (world.status.state, condition_states(world)["Progressing"]) == ("Queued", ("False", "Queued"))
    assert list(world.events.values()).count("Preempted") == 1
    assert world.objects["Job", "sim-real-e1"]["spec"].get("maxFailedIndexes") is None, "it is not given up"
    world.tick(HOURS)
    world.admit("sim-real-e1")
    run_pods(world)
    after = world.status
    assert (after.restarts, after.execution, after.faults) == (before.restarts, before.execution, [])
    assert (after.state, condition_states(world)["Progressing"]) == ("Training", ("True", "Training"))


def test_checkpoint_saved_on_preemption_becomes_the_newest() -> None:
    world = start_job(**QUEUE)
    name = world.active_jobs()[0]
    world.hold(name)
    world.settle()
    world.finish(world.alive()[0], "Yielded")
    world.settle()
    assert world.status.checkpoint
    assert world.status.checkpoint.latest == "pseudo-10"


def test_readmitted_pods_are_not_judged_by_earlier_reports() -> None:
    """The operator keeps the reports of an execution; hours in a queue are no hang of the next pods."""
    world = start_job(**QUEUE, spec__hang={"stepSeconds": 100})
    (pod,) = world.alive()
    world.report(pod, 3)
    said = world.last_reports()
    preempt(world, "Yielded")
    world.tick(HOURS)
    world.admit("sim-pseudo-e1")
    make_passes(world)
    for start in (str, run_pods):
        start(world)
        wanted = plan(replace(world.observe(), last_reports=said), world.now, SETTINGS)
        assert (wanted.status.restarts, wanted.status.execution, wanted.stop) == (0, 1, ())
        assert wanted.requeue_after != 0


def test_a_job_that_its_user_suspends_leaves_its_queue() -> None:
    world = queued_world()
    world.set(suspend=True)
    make_passes(world)
    assert (world.active_jobs(), world.status.state) == ([], "Suspended")
    world.set(suspend=False, scheduling=Scheduling(queue="night"))
    world.queues = False
    run_pods(world)
    (name,) = world.active_jobs()
    assert world.objects["Job", name]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "night"
    assert world.status.state == "Training"
