"""Bounds on restarts, avoided nodes, deadlines, and remains of a job that has ended."""

from typing import Any

import pytest
from pseudoreal_operator import clock
from pseudoreal_operator.status.conditions import find

from tests.unit.operator.lifecycle.support.steps import begun, fail_execution, run_pods, until
from tests.unit.operator.support.world import UID, World, make_job


def failed(world: World) -> tuple[str, str]:
    condition = find(world.status, "Failed")
    return (condition.reason, condition.message) if condition else ("", "")


def go_on(world: World) -> None:
    """Wait out the backoff, and start the next execution."""
    world.tick(301)
    run_pods(world)


def test_restarts_count_within_a_window() -> None:
    world = begun(spec__restart={"maxRestarts": 2, "windowSeconds": 1000})
    for _ in range(5):
        # 301 s apart from each other at least: never more than two within 1000 s before a third.
        fail_execution(world)
        assert failed(world) == ("", "")
        go_on(world)
        world.tick(300)
    assert (world.status.restarts, world.status.execution, len(world.status.faults)) == (5, 6, 2)


def test_too_many_restarts_within_the_window_fail_the_job() -> None:
    world = begun(spec__restart={"maxRestarts": 2, "windowSeconds": 1000})
    for _ in range(3):
        fail_execution(world)
        go_on(world)
    assert failed(world)[0] == "RestartsExhausted"
    assert "2 restarts within 1000 s (spec.restart.windowSeconds)" in failed(world)[1]


def test_a_job_that_fails_says_how_another_goes_on_from_its_checkpoints() -> None:
    world = until(World(make_job(spec__restart={"maxRestarts": 0})), "real")
    fail_execution(world)
    folder = f"sim-{UID[:8]}"
    assert failed(world)[1].endswith(f"a new job goes on from them with spec.checkpoint.continueFrom: {folder})")
    without = begun(spec__restart={"maxRestarts": 0})
    fail_execution(without)
    assert "continueFrom" not in failed(without)[1]


@pytest.mark.parametrize(
    ("policy", "says"),
    [("Retain", "Its checkpoints stay: a new job"), ("Delete", "Its checkpoints go when this job is deleted")],
)
def test_it_says_which_claim_has_them_and_whether_it_stays(policy: str, says: str) -> None:
    volume = {"retentionPolicy": policy}
    world = until(World(make_job(spec__restart={"maxRestarts": 0}, spec__checkpoint__storage__volume=volume)), "real")
    fail_execution(world)
    message = failed(world)[1]
    assert says in message
    assert f"continueFrom: sim-{UID[:8]} and spec.checkpoint.storage.volume.claimName: sim-checkpoints)" in message


def test_resumes_and_disruptions_are_executions_but_no_restarts() -> None:
    world = begun()
    world.disrupt(world.alive()[0])
    world.control()
    world.carry_out(world.plan())
    assert (world.status.execution, world.status.restarts, world.status.faults) == (2, 0, [])


def test_a_pod_that_cannot_be_ended_is_on_a_lost_node() -> None:
    world = begun(spec__restart={"backoffSeconds": 0})
    (pod,) = world.alive()
    pod["spec"] = {"nodeName": "off"}
    world.lose(pod)
    world.tick(30 + 14)
    world.settle()
    assert world.status.execution == 1, "it may still end by itself, with a checkpoint"
    world.tick(1)
    world.settle()
    assert (world.status.execution, world.status.restarts, world.status.faults) == (2, 0, [])
    assert world.active_jobs() == [], "nothing starts before it is known to be gone"
    progressing = find(world.status, "Progressing")
    assert progressing
    assert progressing.reason == "AwaitingCleanup"
    assert "If its node off is lost, delete the pod" in progressing.message
    world.vanish(pod)
    world.settle()
    assert world.active_jobs() == ["sim-pseudo-e2"]


def test_a_pod_that_cannot_be_ended_obeys_the_user_s_rules() -> None:
    world = begun(spec__restart={"rules": [{"onPodConditions": ["DisruptionTarget"], "action": "Fail"}]})
    world.lose(world.alive()[0])
    world.tick(46)
    world.settle()
    assert failed(world)[0] == "Disrupted"
    assert "its node (none) may be lost" in failed(world)[1]


@pytest.mark.parametrize("exit_code", [0, 78])
def test_a_job_that_ends_is_looked_at_once_more(exit_code: int) -> None:
    """No event may ever wake the job again, and its time to live begins."""
    world = until(World(make_job(spec__deadlines={"ttlSecondsAfterFinished": 100})), "real")
    for pod in world.alive():
        world.finish(pod, "Succeeded" if exit_code == 0 else "InvalidJob")
    world.control()
    ending = world.plan()
    world.carry_out(ending)
    assert world.status.state in ("Complete", "Failed")
    assert ending.requeue_after == 0
    assert world.plan().requeue_after == 100


def test_a_node_where_faults_begin_again_and_again_is_avoided() -> None:
    world = begun(spec__restart={"maxRestarts": 9, "avoidNodesAfter": 2})
    for node in ("bad", "good", "bad"):
        assert world.status.avoided_nodes == []
        (pod,) = world.alive()
        pod["spec"] = {"nodeName": node}
        fail_execution(world)
        go_on(world)
    assert world.status.avoided_nodes == ["bad"]
    assert list(world.events.values()).count("NodeAvoided") == 1


def test_a_user_s_rule_fails_the_job_at_once() -> None:
    world = begun(spec__restart={"rules": [{"onExitCodes": [3], "action": "Fail"}]})
    fail_execution(world, exit_code=3)
    assert failed(world)[0] == "PodFailed"
    assert "A rule of spec.restart.rules says Fail." in failed(world)[1]


def unstarted(**changes: Any) -> World:
    """Return a world whose pods do not start."""
    world = World(make_job(**changes))
    world.settle()
    world.control()
    return world


def test_pods_that_do_not_start_in_time_fail_the_job() -> None:
    world = unstarted(spec__deadlines={"startupSeconds": 60, "onStartupTimeout": "Fail"})
    world.tick(59)
    world.settle()
    assert failed(world) == ("", "")
    world.tick(1)
    world.settle()
    assert failed(world)[0] == "StartupDeadlineExceeded"
    assert "0 of 1 pods ran 60 s after they were asked for" in failed(world)[1]


def test_pods_that_started_in_time_have_no_such_deadline() -> None:
    world = begun(spec__deadlines={"startupSeconds": 60, "onStartupTimeout": "Fail"})
    world.tick(600)
    world.settle()
    assert failed(world) == ("", "")


def test_each_execution_has_its_own_startup_deadline() -> None:
    world = begun(
        spec__deadlines={"startupSeconds": 60, "onStartupTimeout": "Fail"}, spec__restart={"backoffSeconds": 0}
    )
    world.tick(600)
    fail_execution(world)
    world.settle()
    world.tick(59)
    world.settle()
    assert failed(world) == ("", "")


def test_time_in_a_queue_does_not_count() -> None:
    world = unstarted(spec__deadlines={"startupSeconds": 60, "onStartupTimeout": "Fail"})
    job = world.objects["Job", "sim-pseudo-e1"]
    job["spec"]["suspend"] = True
    world.tick(600)
    world.settle()
    job["spec"]["suspend"] = False
    job["status"] = {"startTime": clock.to_text(world.now)}
    world.tick(59)
    world.settle()
    assert failed(world) == ("", "")
    world.tick(1)
    world.settle()
    assert failed(world)[0] == "StartupDeadlineExceeded"


def test_time_of_suspension_does_not_count_for_the_active_deadline() -> None:
    world = begun(spec__deadlines={"activeSeconds": 100})
    world.set(suspend=True)
    world.settle()
    world.tick(6000)
    world.settle()
    world.set(suspend=False)
    for pod in world.orphans():
        world.vanish(pod)
    world.settle()
    world.tick(99)
    world.settle()
    assert failed(world) == ("", "")
    world.tick(1)
    world.settle()
    assert failed(world)[0] == "DeadlineExceeded"


@pytest.mark.parametrize("seconds", [0, 60])
def test_a_job_that_has_ended_expires(seconds: int) -> None:
    world = World(make_job(spec__deadlines={"ttlSecondsAfterFinished": seconds}))
    world.run_fairly()
    if seconds:
        world.now = clock.from_text(world.status.completion_time or "")
        world.tick(seconds - 1)
        assert (world.plan().expire, world.plan().requeue_after) == (False, 1)
        world.tick(1)
    assert world.plan().expire


def test_a_job_without_a_time_to_live_stays() -> None:
    world = World(make_job())
    world.run_fairly()
    world.tick(10**8)
    assert (world.plan().expire, world.plan().requeue_after) == (False, None)


@pytest.mark.parametrize(("children", "left"), [("Keep", 3), ("Delete", 0)])
def test_children_of_a_job_that_has_ended(children: str, left: int) -> None:
    world = World(make_job(spec__cleanUp={"children": children}))
    world.run_fairly()
    world.carry_out(world.plan())
    assert len([kind for kind, _ in world.objects if kind == "Job"]) == left
