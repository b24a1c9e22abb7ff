"""Pods of an execution that cannot continue are ended soon, unless they can still save together."""

from typing import Any

import pytest
from pseudoreal_operator import clock
from pseudoreal_operator.lifecycle.clocks import ORIGIN_SECONDS, STOP_SECONDS
from pseudoreal_operator.status.conditions import find

from tests.support.names import bare
from tests.unit.operator.lifecycle.support.steps import run_until
from tests.unit.operator.support.world import World, make_job

QUICK = {"spec__restart": {"backoffSeconds": 10}}
ENDS: list[dict[str, Any]] = [*({"outcome": o} for o in ("Failed", "InvalidJob", "OutOfMemory")), {"exit_code": 137}]
LOST_PEER: dict[str, Any] = {"outcome": "Failed", "peer_lost": True}


def two_pods(**changes: Any) -> World:
    """Return a world in which the first execution of the phase real trains on two workers."""
    return run_until(World(make_job(**QUICK, **changes)), "real")


def name(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["name"])


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("end", ENDS, ids=str)
def test_failed_pod_stops_its_peers(victim: int, end: dict[str, Any]) -> None:
    world = two_pods()
    pods = world.alive()
    world.finish(pods[victim], **end)
    wanted = world.plan()
    assert (wanted.stop, [*map(bare, wanted.fail_jobs)]) == ((name(pods[1 - victim]),), ["sim-real-e1"])
    assert wanted.delete == (), "the Job stays, with what its pods logged"
    world.carry_out(wanted)
    progressing = find(world.status, "Progressing")
    assert progressing
    assert (progressing.reason, progressing.message.split()[1]) == ("Ending", name(pods[victim]))
    again = world.plan()
    assert (again.stop, again.fail_jobs) == ((), ()), "once is enough"


def test_disrupted_pod_that_did_not_save_stops_its_peers() -> None:
    world = two_pods()
    gone, other = world.alive()
    world.disrupt(gone)
    assert world.plan().stop == (name(other),)


def test_pods_that_save_together_keep_their_grace_period() -> None:
    world = two_pods()
    saved, _ = world.alive()
    world.finish(saved, "Yielded")
    world.tick(100)
    assert (world.plan().stop, world.plan().fail_jobs) == ((), ())


def test_pods_of_a_suspended_job_keep_their_grace_period() -> None:
    world = two_pods()
    world.set(suspend=True)
    world.settle()
    assert len(world.orphans()) == 2
    assert world.plan().stop == ()


@pytest.mark.parametrize("victim", [0, 1])
def test_origin_of_a_failure_has_time_to_report_after_its_peer_ended(victim: int) -> None:
    world = two_pods()
    pods = world.alive()
    world.finish(pods[1 - victim], **LOST_PEER)
    wanted = world.plan()
    assert (wanted.stop, wanted.fail_jobs) == ((), ())
    assert wanted.requeue_after is not None
    assert wanted.requeue_after <= ORIGIN_SECONDS
    world.carry_out(wanted)
    world.tick(ORIGIN_SECONDS - 1)
    world.finish(pods[victim], "Failed")
    world.control()
    world.carry_out(world.plan())
    assert [fault.pod for fault in world.status.faults] == [name(pods[victim])]


def test_failure_without_a_stated_cause_blames_no_pod() -> None:
    world = two_pods()
    lost, silent = world.alive()
    world.finish(lost, **LOST_PEER)
    world.tick(ORIGIN_SECONDS)
    assert world.plan().stop == (name(silent),)
    world.settle()
    world.control()
    world.carry_out(world.plan())
    (fault,) = world.status.faults
    assert (fault.reason, fault.pod, fault.node) == ("PeerLost", None, None)
    assert world.status.avoided_nodes == []


@pytest.mark.parametrize("skew", [3600.0, -3600.0])
def test_stopping_does_not_depend_on_the_clocks_of_nodes(skew: float) -> None:
    """With a node clock an hour ahead, the end of a pod was once noticed an hour late; with one an hour behind,
    there was no backoff."""
    world = two_pods()
    world.node_skew = skew
    lost, silent = world.alive()
    world.finish(lost, **LOST_PEER)
    world.settle()
    world.tick(ORIGIN_SECONDS)
    assert world.plan().stop == (name(silent),)
    failed = world.now
    world.settle()
    world.control()
    world.carry_out(world.plan())
    after = clock.from_text(world.status.restart_after or "").timestamp() - failed.timestamp()
    assert 10 - ORIGIN_SECONDS <= after <= 10


@pytest.mark.parametrize("skew", [3600.0, -3600.0])
def test_stuck_pods_are_found_whatever_the_clock_of_the_api_server(skew: float) -> None:
    """An operator with a clock ahead once took every pod in its grace period for stuck."""
    world = two_pods()
    world.api_skew = skew
    off, other = world.alive()
    world.lose(off)
    world.settle()
    world.tick(30 + 14)
    assert (world.plan().stop, world.status.execution) == ((), 1)
    world.tick(1)
    assert world.plan().stop == (name(other),)


def test_pods_of_a_hung_execution_are_ended() -> None:
    world = two_pods(spec__hang={"stepSeconds": 100})
    pods = world.alive()
    for seconds in (0, 101):
        world.tick(seconds)
        for pod in pods:
            world.report(pod, 3)
    verdict = world.plan()
    assert (verdict.stop, verdict.delete) == ((), ()), "the number of the next execution must be safe first"
    world.carry_out(verdict)
    wanted = world.plan()
    assert (set(wanted.stop), [*map(bare, wanted.delete)]) == (set(map(name, pods)), ["sim-real-e1"])


def test_peers_of_a_stuck_pod_are_ended() -> None:
    world = two_pods()
    off, other = world.alive()
    world.lose(off)
    world.tick(30 + 14)
    assert world.plan().stop == ()
    world.tick(1)
    assert world.plan().stop == (name(other),)


def test_pods_that_end_soon_are_not_stopped() -> None:
    world = two_pods()
    gone, other = world.alive()
    other["metadata"]["deletionTimestamp"] = clock.to_text(world.now)
    world.finish(gone, "Failed")
    assert world.plan().stop == ()
    world.tick(-STOP_SECONDS - 1)
    assert world.plan().stop == (name(other),), "a long grace period is made shorter"


def test_failing_job_is_not_failed_again() -> None:
    """The Job was created by an earlier release, and the Job controller ends it by itself."""
    world = two_pods()
    gone, other = world.alive()
    world.finish(gone, "Failed")
    world.objects["Job", "sim-real-e1"]["status"] = {"conditions": [{"type": "FailureTarget", "status": "True"}]}
    assert (world.plan().fail_jobs, world.plan().stop) == ((), (name(other),))


def test_backoff_counts_from_the_first_failure() -> None:
    world = two_pods()
    gone, _ = world.alive()
    world.finish(gone, "Failed")
    failed = world.now
    world.settle()
    world.tick(7)
    world.control()
    world.carry_out(world.plan())
    assert clock.from_text(world.status.restart_after or "").timestamp() - failed.timestamp() == 10
