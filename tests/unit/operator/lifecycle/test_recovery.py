"""Bounds on restarts, avoided nodes, deadlines, and remains of a job that has ended."""

from typing import Any

import pytest
from pseudoreal_operator import clock
from pseudoreal_operator.lifecycle.clocks import ORIGIN_SECONDS
from pseudoreal_operator.status.conditions import find

from tests.unit.operator.lifecycle.support.steps import fail_execution, run_pods, run_until, start_job
from tests.unit.operator.support.world import UID, World, make_job


def failure(world: World) -> tuple[str, str]:
    condition = find(world.status, "Failed")
    return (condition.reason, condition.message) if condition else ("", "")


def start_next_execution(world: World) -> None:
    """Wait out the backoff, and start the next execution."""
    world.tick(301)
    run_pods(world)


def test_restarts_count_within_a_window() -> None:
    world = start_job(spec__restart={"maxRestarts": 2, "windowSeconds": 1000})
    for _ in range(5):
        # 301 s apart from each other at least: never more than two within 1000 s before a third.
        fail_execution(world)
        assert failure(world) == ("", "")
        start_next_execution(world)
        world.tick(300)
    assert (world.status.restarts, world.status.execution, len(world.status.faults)) == (5, 6, 2)


def test_too_many_restarts_within_the_window_fail_the_job() -> None:
    world = start_job(spec__restart={"maxRestarts": 2, "windowSeconds": 1000})
    for _ in range(3):
        fail_execution(world)
        start_next_execution(world)
    assert failure(world)[0] == "RestartsExhausted"
    assert "(used within spec.restart.windowSeconds, 1000 s: 2;" in failure(world)[1]


def test_failed_job_says_how_to_continue_from_its_checkpoints() -> None:
    world = run_until(World(make_job(spec__restart={"maxRestarts": 0})), "real")
    fail_execution(world)
    folder = f"sim-{UID[:8]}"
    assert failure(world)[1].endswith(f"a new job can continue from them with spec.checkpoint.continueFrom: {folder})")
    without = start_job(spec__restart={"maxRestarts": 0})
    fail_execution(without)
    assert "continueFrom" not in failure(without)[1]


@pytest.mark.parametrize(
    ("policy", "says"),
    [("Retain", "Its checkpoints stay: a new job"), ("Delete", "Its checkpoints are deleted with this job")],
)
def test_failed_job_names_its_claim_and_whether_the_claim_stays(policy: str, says: str) -> None:
    volume = {"retentionPolicy": policy}
    world = run_until(
        World(make_job(spec__restart={"maxRestarts": 0}, spec__checkpoint__storage__volume=volume)), "real"
    )
    fail_execution(world)
    message = failure(world)[1]
    assert says in message
    assert f"continueFrom: sim-{UID[:8]} and spec.checkpoint.storage.volume.claimName: sim-checkpoints)" in message


def test_resumes_and_disruptions_start_executions_without_counting_restarts() -> None:
    world = start_job()
    world.disrupt(world.alive()[0])
    world.control()
    world.carry_out(world.plan())
    assert (world.status.execution, world.status.restarts, world.status.faults) == (2, 0, [])


def test_stuck_pod_ends_the_execution_as_node_lost() -> None:
    world = start_job(spec__restart={"backoffSeconds": 0})
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


def test_restart_rules_apply_to_stuck_pods() -> None:
    world = start_job(spec__restart={"rules": [{"onPodConditions": ["DisruptionTarget"], "action": "Fail"}]})
    world.lose(world.alive()[0])
    world.tick(46)
    world.settle()
    assert failure(world)[0] == "Disrupted"
    assert "its node (none) may be lost" in failure(world)[1]


def test_restart_rules_apply_when_a_worker_is_missing() -> None:
    """One pod vanishes; the other ends with exit code 1 and reports a lost peer."""
    rules = [{"onExitCodes": [1], "action": "Fail"}]
    world = start_job(spec__phases__0__workers=2, spec__restart={"rules": rules})
    world.vanish(world.alive()[0])
    world.finish(world.alive()[0], "Failed", peer_lost=True)
    world.settle()
    world.tick(ORIGIN_SECONDS)
    world.settle()
    assert world.status.state == "Failed"


@pytest.mark.parametrize("exit_code", [0, 78])
def test_job_that_ends_gets_one_more_pass(exit_code: int) -> None:
    """No event may ever wake the job again, and its time to live begins."""
    world = run_until(World(make_job(spec__deadlines={"ttlSecondsAfterFinished": 100})), "real")
    for pod in world.alive():
        world.finish(pod, "Succeeded" if exit_code == 0 else "InvalidJob")
    world.control()
    ending = world.plan()
    world.carry_out(ending)
    assert world.status.state in ("Complete", "Failed")
    assert ending.requeue_after == 0
    assert world.plan().requeue_after == 100


def test_node_where_faults_begin_repeatedly_is_avoided() -> None:
    world = start_job(spec__restart={"maxRestarts": 9, "avoidNodesAfter": 2})
    for node in ("bad", "good", "bad"):
        assert world.status.avoided_nodes == []
        (pod,) = world.alive()
        pod["spec"] = {"nodeName": node}
        fail_execution(world)
        start_next_execution(world)
    assert world.status.avoided_nodes == ["bad"]
    assert list(world.events.values()).count("NodeAvoided") == 1


def test_a_user_s_rule_fails_the_job_at_once() -> None:
    world = start_job(spec__restart={"rules": [{"onExitCodes": [3], "action": "Fail"}]})
    fail_execution(world, exit_code=3)
    assert failure(world)[0] == "PodFailed"
    assert "A rule of spec.restart.rules says Fail." in failure(world)[1]


def world_without_started_pods(**changes: Any) -> World:
    """Return a world whose pods do not start."""
    world = World(make_job(**changes))
    world.settle()
    world.control()
    return world


def test_pods_that_do_not_start_in_time_fail_the_job() -> None:
    world = world_without_started_pods(spec__deadlines={"startupSeconds": 60, "onStartupTimeout": "Fail"})
    world.tick(59)
    world.settle()
    assert failure(world) == ("", "")
    world.tick(1)
    world.settle()
    assert failure(world)[0] == "StartupDeadlineExceeded"
    assert "0 of 1 pods ran 60 s after their creation" in failure(world)[1]


def test_startup_deadline_does_not_apply_to_started_pods() -> None:
    world = start_job(spec__deadlines={"startupSeconds": 60, "onStartupTimeout": "Fail"})
    world.tick(600)
    world.settle()
    assert failure(world) == ("", "")


def test_each_execution_has_its_own_startup_deadline() -> None:
    world = start_job(
        spec__deadlines={"startupSeconds": 60, "onStartupTimeout": "Fail"}, spec__restart={"backoffSeconds": 0}
    )
    world.tick(600)
    fail_execution(world)
    world.settle()
    world.tick(59)
    world.settle()
    assert failure(world) == ("", "")


def test_startup_deadline_excludes_time_in_the_queue() -> None:
    world = world_without_started_pods(spec__deadlines={"startupSeconds": 60, "onStartupTimeout": "Fail"})
    job = world.objects["Job", "sim-pseudo-e1"]
    job["spec"]["suspend"] = True
    world.tick(600)
    world.settle()
    job["spec"]["suspend"] = False
    job["status"] = {"startTime": clock.to_text(world.now)}
    world.tick(59)
    world.settle()
    assert failure(world) == ("", "")
    world.tick(1)
    world.settle()
    assert failure(world)[0] == "StartupDeadlineExceeded"


def test_active_deadline_excludes_suspended_time() -> None:
    world = start_job(spec__deadlines={"activeSeconds": 100})
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
    assert failure(world) == ("", "")
    world.tick(1)
    world.settle()
    assert failure(world)[0] == "DeadlineExceeded"


@pytest.mark.parametrize("seconds", [0, 60])
def test_ended_job_is_deleted_after_ttl(seconds: int) -> None:
    world = World(make_job(spec__deadlines={"ttlSecondsAfterFinished": seconds}))
    world.run_fairly()
    if seconds:
        world.now = clock.from_text(world.status.completion_time or "")
        world.tick(seconds - 1)
        assert (world.plan().expire, world.plan().requeue_after) == (False, 1)
        world.tick(1)
    assert world.plan().expire


def test_ended_job_without_ttl_stays() -> None:
    world = World(make_job())
    world.run_fairly()
    world.tick(10**8)
    assert (world.plan().expire, world.plan().requeue_after) == (False, None)


@pytest.mark.parametrize(("children", "left"), [("Keep", 3), ("Delete", 0)])
def test_clean_up_decides_which_children_of_an_ended_job_stay(children: str, left: int) -> None:
    world = World(make_job(spec__cleanUp={"children": children}))
    world.run_fairly()
    world.carry_out(world.plan())
    assert len([kind for kind, _ in world.objects if kind == "Job"]) == left
