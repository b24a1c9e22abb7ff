"""Phases that are trained again: at the user's request, and when a delink times out."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

from pseudoreal_api.spec.request import Request
from pseudoreal_operator import clock
from pseudoreal_operator.observe.stages import phases_to_finish
from pseudoreal_operator.status.conditions import ACCEPTED, find

from tests.unit.operator.lifecycle.support.steps import config, run_until, settle_without_orphans
from tests.unit.operator.support.world import World, make_job

ASKED = {"id": "1", "type": "RepeatPhase", "phase": "pseudo"}
QUICK = {"spec__restart": {"backoffSeconds": 0, "maxRestarts": 2}}


def request_repetition(world: World, phase: str, request: str = "1") -> None:
    asked = Request(id=request, type="RepeatPhase", phase=phase)
    world.set(requests=[*world.job.spec.requests, asked])
    world.carry_out(world.plan())


def test_repeated_phase_starts_from_its_start_checkpoint() -> None:
    world = run_until(World(make_job(**QUICK)), "real")
    request_repetition(world, "real")
    settle_without_orphans(world)
    assert world.active_jobs() == ["sim-real-e2"]
    pseudo, real = world.status.phases
    assert (pseudo.state, real.state, real.start_checkpoint) == ("Complete", "Training", "real-20")
    assert real.discards
    # The checkpoint that the delink made for it has the step at which pseudo ended, and stays.
    assert (real.discards[0].before_execution, real.discards[0].from_step) == (2, 11)
    assert world.status.restarts == 0
    world.run_fairly()
    assert world.status.state == "Complete"


def test_phases_after_a_repeated_phase_are_trained_again() -> None:
    world = run_until(World(make_job(**QUICK)), "real")
    request_repetition(world, "pseudo")
    pseudo, real = world.status.phases
    assert (pseudo.state, pseudo.end_checkpoint, real.state, real.start_checkpoint) == (
        "Training",
        None,
        "Pending",
        None,
    )
    assert pseudo.discards
    assert real.discards
    assert (pseudo.discards[0].from_step, real.discards[0].from_step) == (0, 0)
    settle_without_orphans(world)
    world.run_fairly()
    assert world.status.state == "Complete"
    assert list(world.events.values()).count("PhaseStarted") == 3
    assert list(world.events.values()).count("PhaseRepeated") == 1


def test_each_request_is_served_once() -> None:
    world = run_until(World(make_job(**QUICK)), "pseudo")
    request_repetition(world, "pseudo", "1")
    settle_without_orphans(world)
    assert (world.status.execution, world.changes(world.plan())) == (2, False)
    assert world.status.served_requests == ["1"]
    request_repetition(world, "pseudo", "2")
    assert (world.status.execution, world.status.served_requests) == (3, ["1", "2"])


def test_id_of_a_removed_request_leaves_the_status() -> None:
    world = run_until(World(make_job(**QUICK)), "pseudo")
    request_repetition(world, "pseudo", "1")
    settle_without_orphans(world)
    world.set(requests=[])
    world.settle()
    assert (world.status.execution, world.status.served_requests) == (2, [])


def request_finish(world: World, phase: str) -> None:
    world.set(requests=[Request(id="early", type="FinishPhase", phase=phase)])
    world.settle()


def report_told_to_finish(world: World) -> None:
    """Deliver the request to the pods, in the answers to their reports."""
    for pod in world.alive():
        world.report(pod, 1)
    world.reports = {name: replace(last_report, told_to_finish=True) for name, last_report in world.reports.items()}
    world.settle()


def progressing_message(world: World) -> str:
    return (find(world.status, "Progressing") or ACCEPTED).message


def test_finish_request_is_served_when_its_phase_is_complete() -> None:
    world = run_until(World(make_job(**QUICK)), "pseudo")
    request_finish(world, "pseudo")
    assert world.status.served_requests == []
    assert "told to end now when they report next" in progressing_message(world)
    assert "FinishRequested" not in world.events.values()
    report_told_to_finish(world)
    assert "was asked to end now" in progressing_message(world)
    assert list(world.events.values()).count("FinishRequested") == 1
    world.finish_all()
    world.settle()
    assert (world.status.phases[0].state, world.status.served_requests) == ("Complete", ["early"])


def test_finish_request_for_a_complete_phase_is_served_at_once() -> None:
    world = run_until(World(make_job(**QUICK)), "real")
    request_finish(world, "pseudo")
    assert (world.status.served_requests, world.status.current_phase) == (["early"], "real")


def test_finish_request_for_a_later_phase_waits_for_that_phase() -> None:
    world = run_until(World(make_job(**QUICK)), "pseudo")
    request_finish(world, "real")
    assert phases_to_finish(world.job.spec, world.status) == {"real"}
    run_until(world, "real")
    world.settle()
    report_told_to_finish(world)
    assert "was asked to end now" in progressing_message(world)
    world.run_fairly()
    assert (world.status.state, world.status.served_requests) == ("Complete", ["early"])


def test_repeat_request_in_a_new_job_counts_as_served() -> None:
    world = run_until(World(make_job(**QUICK, spec__requests=[ASKED])), "pseudo")
    assert world.status.execution == 1


def test_repeat_request_for_a_pending_phase_changes_nothing() -> None:
    world = run_until(World(make_job(**QUICK)), "pseudo")
    request_repetition(world, "real")
    settle_without_orphans(world)
    assert world.active_jobs() == ["sim-pseudo-e1"]


def test_repeat_request_does_not_reopen_an_ended_job() -> None:
    world = World(make_job(**QUICK))
    world.run_fairly()
    before = world.status
    request_repetition(world, "real")
    assert world.status == before.model_copy(update={"observed_generation": world.job.metadata.generation})


def overdue_delink(**delink: Any) -> World:
    world = run_until(World(make_job(**QUICK, spec__delink={"timeoutSeconds": 400} | delink)), "real-delink")
    transition = world.status.transition
    assert transition
    assert (transition.id, transition.from_phase, transition.to_phase) == ("pseudo-real-e1", "pseudo", "real")
    assert clock.from_text(transition.deadline) - clock.from_text(transition.start_time) == timedelta(seconds=400)
    assert (world.plan().requeue_after or 0) <= 400
    world.tick(400)
    world.carry_out(world.plan())
    return world


def test_delink_timeout_fails_the_job() -> None:
    world = overdue_delink()
    failed = find(world.status, "Failed")
    assert failed
    assert failed.reason == "DelinkTimeout"
    assert "spec.delink.timeoutSeconds" in failed.message
    assert world.status.transition is None


def test_delink_timeout_rolls_back_to_an_earlier_checkpoint() -> None:
    world = overdue_delink(onTimeout="RollBack")
    pseudo, real = world.status.phases
    assert (pseudo.state, real.state, world.status.restarts) == ("Training", "Pending", 1)
    assert pseudo.discards
    # From the newest checkpoint before the one at its end, which is at step 10.
    assert (pseudo.discards[0].before_execution, pseudo.discards[0].from_step) == (2, 10)
    assert "DelinkRolledBack" in world.events.values()
    settle_without_orphans(world)
    world.run_fairly()
    assert world.status.state == "Complete"
    assert world.status.transition is None


def test_discards_of_an_earlier_rollback_stay_in_force() -> None:
    world = run_until(World(make_job(**QUICK, spec__delink={"timeoutSeconds": 400, "onTimeout": "RollBack"})), "real")
    request_repetition(world, "pseudo")
    settle_without_orphans(world)
    run_until(world, "real-delink")
    world.tick(400)
    world.carry_out(world.plan())
    pseudo, real = world.status.phases
    assert [(rule.before_execution, rule.from_step) for rule in pseudo.discards or ()] == [(2, 0), (3, 10)]
    found = [(rule.before_execution, rule.from_step, rule.continued) for rule in real.discards or ()]
    assert found == [(2, 0, True), (3, 0, False)], "the first also counts for a job that this one continues"
    request_repetition(world, "pseudo", request="2")
    found = [(rule.before_execution, rule.from_step, rule.continued) for rule in world.status.phases[1].discards or ()]
    assert found == [(4, 0, True)], "it covers both"


def test_rollbacks_count_against_max_restarts() -> None:
    world = overdue_delink(onTimeout="RollBack")
    for _ in range(2):
        settle_without_orphans(world)
        run_until(world, "real-delink")
        world.tick(400)
        world.carry_out(world.plan())
    failed = find(world.status, "Failed")
    assert failed
    assert failed.reason == "DelinkTimeout"
    assert "maxRestarts: 2" in failed.message


def test_delink_timeout_does_not_run_while_the_job_is_suspended() -> None:
    world = run_until(World(make_job(**QUICK, spec__delink={"timeoutSeconds": 400})), "real-delink")
    world.set(suspend=True)
    world.settle()
    world.tick(600)
    world.set(suspend=False)
    for pod in world.orphans():
        world.vanish(pod)
    world.settle()
    assert find(world.status, "Failed") is None
    world.run_fairly()
    assert world.status.state == "Complete"


def test_repeat_request_during_the_delink_into_the_phase_changes_nothing() -> None:
    world = run_until(World(make_job(**QUICK)), "real-delink")
    request_repetition(world, "real")
    settle_without_orphans(world)
    assert world.active_jobs() == ["sim-real-delink-e1"]


def test_discards_are_in_the_trainer_config() -> None:
    world = run_until(World(make_job(**QUICK)), "real")
    assert "discards" not in config(world, "sim-real-e1")
    request_repetition(world, "pseudo")
    settle_without_orphans(world)
    run_until(world, "real")
    rule = {"beforeExecution": 2, "fromStep": 0, "continued": True}
    for stage in ("sim-pseudo-e2", "sim-real-delink-e2", "sim-real-e2"):
        assert config(world, stage)["discards"] == {"pseudo": [rule], "real": [rule]}, "also of phases to come"
