"""Children that the API server rejects: for good when the job is first seen, for a while later."""

from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from pseudoreal_operator.lifecycle.plan import Plan, plan_blocked, plan_rejected
from pseudoreal_operator.status.conditions import find

from tests.unit.operator.lifecycle.support.steps import condition_message, condition_states, run_until
from tests.unit.operator.support.world import UID, World, make_job

REFUSAL = "The API server refuses a change of this job's children: requests must not exceed limits"


def test_new_job_gets_a_dry_run_of_the_children_of_all_stages() -> None:
    world = World(make_job())
    first = world.plan()
    assert (len([m for m in first.dry_run if m["kind"] == "Job"]), first.apply) == (3, ())
    world.carry_out(first)
    assert world.plan().dry_run == (), "once"


def test_created_children_equal_those_of_the_dry_run() -> None:
    world = World(make_job())
    tried = {m["metadata"]["name"] for m in world.plan().dry_run if m["kind"] == "Job"}
    world.run_fairly()
    assert {body["metadata"]["name"] for (kind, _), body in world.objects.items() if kind == "Job"} == tried


def test_rejected_dry_run_fails_a_new_job_before_training() -> None:
    world = World(make_job())
    world.plan()
    world.carry_out(plan_rejected(world.observe(), REFUSAL, world.now))
    assert condition_states(world)["Accepted"] == ("False", "InvalidSpec")
    assert condition_message(world, "Failed") == REFUSAL


def test_rejection_of_a_later_phase_blocks_the_job_without_failing_it() -> None:
    """The pseudo phase may have taken weeks."""
    world = run_until(World(make_job()), "real-delink")
    world.finish_all()
    world.carry_out(world.plan())
    world.carry_out(plan_rejected(world.observe(), REFUSAL, world.now))
    assert condition_states(world)["Progressing"] == ("False", "Blocked")
    assert "Failed" not in condition_states(world)
    world.run_fairly()
    assert world.status.state == "Complete"


def reject_children(world: World) -> Plan:
    wanted = plan_blocked(world.observe(), "exceeded quota", world.now)
    world.carry_out(wanted)
    return wanted


def block_job(seconds: int, **changes: Any) -> tuple[World, list[float]]:
    """Return a world whose first children were rejected for `seconds`, and the waits between the attempts."""
    world, waits = World(make_job(**changes)), []
    world.carry_out(world.plan())
    end = world.now + timedelta(seconds=seconds)
    while world.now < end and world.plan().apply:
        wait = reject_children(world).requeue_after
        assert wait is not None
        waits.append(wait)
        world.tick(wait)
    return world, waits


def test_blocked_job_retries_with_growing_waits() -> None:
    _, waits = block_job(3600)
    assert waits[:7] == [5, 5, 10, 20, 40, 80, 160]
    assert set(waits[7:]) == {300}
    assert all(earlier <= later for earlier, later in pairwise(waits))


def test_job_that_is_blocked_again_starts_with_short_waits() -> None:
    world, _ = block_job(3600)
    world.settle()
    assert world.status.blocked_since is None
    assert reject_children(world).requeue_after == 5


def test_a_pass_that_changes_nothing_writes_nothing() -> None:
    world, _ = block_job(60)
    reject_children(world)
    before = world.status
    world.tick(1)
    reject_children(world)
    assert world.status == before


@pytest.mark.parametrize("allowed", [60, 1000])
def test_children_rejected_beyond_startup_seconds_fail_the_job(allowed: int) -> None:
    world, waits = block_job(100_000, spec__deadlines={"startupSeconds": allowed, "onStartupTimeout": "Fail"})
    assert sum(waits) == allowed
    world.settle()
    assert condition_states(world)["Failed"] == ("True", "StartupDeadlineExceeded")
    assert f"within {allowed} s (spec.deadlines.startupSeconds). exceeded quota" in condition_message(world, "Failed")


def test_job_blocked_before_acceptance_retries_with_growing_waits() -> None:
    """A policy rejects the job, and may be changed."""
    world = World(make_job(spec__deadlines={"startupSeconds": 60, "onStartupTimeout": "Fail"}))
    waits = []
    for _ in range(8):
        wait = reject_children(world).requeue_after
        assert wait
        waits.append(wait)
        world.tick(wait)
    assert waits == [5, 5, 10, 20, 20, 60, 120, 240]
    world.settle()
    assert len(world.active_jobs()) == 1


def test_blocked_job_waits_forever_if_a_startup_timeout_restarts() -> None:
    world, _ = block_job(43_200)
    world.run_fairly()
    assert world.status.state == "Complete"


def test_active_deadline_fails_a_blocked_job() -> None:
    world, _ = block_job(1000, spec__deadlines={"activeSeconds": 600})
    world.settle()
    assert condition_states(world)["Failed"] == ("True", "DeadlineExceeded")


def test_job_failed_by_rejections_says_how_to_continue() -> None:
    world = run_until(
        World(make_job(spec__deadlines={"startupSeconds": 60, "onStartupTimeout": "Fail"})), "real-delink"
    )
    world.finish_all()
    world.settle()
    world.objects.clear()
    for pod in world.alive():
        world.vanish(pod)
    world.carry_out(world.plan())
    world.wait_out()
    reject_children(world)
    world.tick(61)
    world.settle()
    failed = find(world.status, "Failed")
    assert failed
    assert failed.reason == "StartupDeadlineExceeded"
    assert f"continueFrom: sim-{UID[:8]}" in failed.message
