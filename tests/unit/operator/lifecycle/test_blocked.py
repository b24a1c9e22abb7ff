"""Children that the API server rejects: for good when the job is first seen, for a while later."""

from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from pseudoreal_operator.lifecycle.plan import Plan, plan_blocked, plan_refusal
from pseudoreal_operator.status.conditions import find

from tests.unit.operator.lifecycle.support.steps import claims, message, until
from tests.unit.operator.support.world import UID, World, make_job

REFUSAL = "The API server refuses a change of this job's children: requests must not exceed limits"


def test_the_children_of_all_stages_are_tried_when_the_job_is_first_seen() -> None:
    world = World(make_job())
    first = world.plan()
    assert (len([m for m in first.dry_run if m["kind"] == "Job"]), first.apply) == (3, ())
    world.carry_out(first)
    assert world.plan().dry_run == (), "once"


def test_what_is_made_later_is_what_was_tried() -> None:
    world = World(make_job())
    tried = {m["metadata"]["name"] for m in world.plan().dry_run if m["kind"] == "Job"}
    world.run_fairly()
    assert {body["metadata"]["name"] for (kind, _), body in world.objects.items() if kind == "Job"} == tried


def test_what_is_refused_at_first_sight_fails_the_job_before_anything_is_trained() -> None:
    world = World(make_job())
    world.plan()
    world.carry_out(plan_refusal(world.observe(), REFUSAL, world.now))
    assert claims(world)["Accepted"] == ("False", "InvalidSpec")
    assert message(world, "Failed") == REFUSAL


def test_a_later_phase_that_is_refused_does_not_cost_the_earlier_ones() -> None:
    """The pseudo phase may have taken weeks."""
    world = until(World(make_job()), "real-delink")
    world.finish_all()
    world.carry_out(world.plan())
    world.carry_out(plan_refusal(world.observe(), REFUSAL, world.now))
    assert claims(world)["Progressing"] == ("False", "Blocked")
    assert "Failed" not in claims(world)
    world.run_fairly()
    assert world.status.state == "Complete"


def refused(world: World) -> Plan:
    wanted = plan_blocked(world.observe(), "exceeded quota", world.now)
    world.carry_out(wanted)
    return wanted


def blocked(seconds: int, **changes: Any) -> tuple[World, list[float]]:
    """Return a world whose first children were rejected for `seconds`, and the waits between the attempts."""
    world, waits = World(make_job(**changes)), []
    world.carry_out(world.plan())
    end = world.now + timedelta(seconds=seconds)
    while world.now < end and world.plan().apply:
        wait = refused(world).requeue_after
        assert wait is not None
        waits.append(wait)
        world.tick(wait)
    return world, waits


def test_who_is_refused_asks_less_and_less_often() -> None:
    _, waits = blocked(3600)
    assert waits[:7] == [5, 5, 10, 20, 40, 80, 160]
    assert set(waits[7:]) == {300}
    assert all(earlier <= later for earlier, later in pairwise(waits))


def test_who_is_refused_again_later_begins_with_short_waits() -> None:
    world, _ = blocked(3600)
    world.settle()
    assert world.status.blocked_since is None
    assert refused(world).requeue_after == 5


def test_a_pass_that_changes_nothing_writes_nothing() -> None:
    world, _ = blocked(60)
    refused(world)
    before = world.status
    world.tick(1)
    refused(world)
    assert world.status == before


@pytest.mark.parametrize("allowed", [60, 1000])
def test_pods_that_are_refused_for_too_long_fail_the_job(allowed: int) -> None:
    world, waits = blocked(100_000, spec__deadlines={"startupSeconds": allowed, "onStartupTimeout": "Fail"})
    assert sum(waits) == allowed
    world.settle()
    assert claims(world)["Failed"] == ("True", "StartupDeadlineExceeded")
    assert f"in {allowed} s, which spec.deadlines.startupSeconds allows. exceeded quota" in message(world, "Failed")


def test_a_job_that_is_refused_before_it_is_accepted_asks_less_and_less_often_too() -> None:
    """A policy rejects the job, and may be changed."""
    world = World(make_job(spec__deadlines={"startupSeconds": 60, "onStartupTimeout": "Fail"}))
    waits = []
    for _ in range(8):
        wait = refused(world).requeue_after
        assert wait
        waits.append(wait)
        world.tick(wait)
    assert waits == [5, 5, 10, 20, 20, 60, 120, 240]
    world.settle()
    assert len(world.active_jobs()) == 1


def test_without_such_a_deadline_the_job_waits_for_its_quota() -> None:
    world, _ = blocked(43_200)
    world.run_fairly()
    assert world.status.state == "Complete"


def test_the_other_deadlines_hold_for_who_is_refused_as_well() -> None:
    world, _ = blocked(1000, spec__deadlines={"activeSeconds": 600})
    world.settle()
    assert claims(world)["Failed"] == ("True", "DeadlineExceeded")


def test_a_job_that_fails_for_it_says_how_to_go_on() -> None:
    world = until(World(make_job(spec__deadlines={"startupSeconds": 60, "onStartupTimeout": "Fail"})), "real-delink")
    world.finish_all()
    world.settle()
    world.objects.clear()
    for pod in world.alive():
        world.vanish(pod)
    world.carry_out(world.plan())
    world.wait_out()
    refused(world)
    world.tick(61)
    world.settle()
    failed = find(world.status, "Failed")
    assert failed
    assert failed.reason == "StartupDeadlineExceeded"
    assert f"continueFrom: sim-{UID[:8]}" in failed.message
