"""Single decisions of the plan, and their traces in the status and the events."""

from dataclasses import replace
from typing import Any

import pytest
from pseudoreal_api.wire.messages import Outcome, ProgressReport
from pseudoreal_api.wire.reports import PodReport, RankReport
from pseudoreal_operator import clock
from pseudoreal_operator.lifecycle.plan import plan, plan_blocked, plan_rejected, plan_unreadable
from pseudoreal_operator.observe.stages import Execution, StageKind
from pseudoreal_operator.observe.view import ChildJob, JobState, LastReport

from tests.support.names import bare
from tests.unit.operator.lifecycle.support.steps import (
    condition_message,
    condition_states,
    fail_execution,
    run_pods,
    run_until,
    start_job,
)
from tests.unit.operator.support.world import SETTINGS, World, make_job


def test_first_pass_writes_the_status_and_creates_nothing() -> None:
    first = World(make_job()).plan()
    assert first.apply == ()
    assert (first.status.execution, [phase.state for phase in first.status.phases]) == (
        1,
        ["Pending", "Pending"],
    )
    assert first.requeue_after == 0


def test_conditions_while_the_job_trains() -> None:
    world = start_job()
    assert condition_states(world) == {
        "Accepted": ("True", "Valid"),
        "Progressing": ("True", "Training"),
        "Delinked": ("False", "Pending"),
        "Suspended": ("False", "NotRequested"),
    }
    assert (world.status.current_phase, world.status.replicas.desired, world.status.replicas.ready) == ("pseudo", 1, 1)


def test_succeeded_pods_change_nothing_until_their_job_completes() -> None:
    world = start_job()
    for pod in world.alive():
        world.finish(pod, "Succeeded")
    assert world.plan().status == world.status
    world.control()
    world.settle()
    assert (world.status.phases[0].state, world.status.replicas.ready) == ("Complete", 0)


def test_conditions_after_the_job_completed() -> None:
    world = start_job()
    world.run_fairly()
    found = condition_states(world)
    assert found["Complete"][0] == "True"
    assert found["Delinked"] == ("True", "Completed")
    assert found["Progressing"][0] == "False"
    assert "Failed" not in found, "the printer column would show its reason"


def test_a_job_of_one_phase_needs_no_delink() -> None:
    phase = {"name": "only", "until": {"step": 10}, "batch": {"sequences": 8}}
    world = start_job(spec__phases=[phase])
    assert condition_states(world)["Delinked"] == ("True", "NotNeeded")
    world.run_fairly()
    assert world.status.state == "Complete"


def test_transition_time_of_a_condition_changes_only_with_its_status() -> None:
    world = start_job()
    before = {c.type: c.last_transition_time for c in world.status.conditions}
    world.tick(60)
    fail_execution(world)
    after = {c.type: c.last_transition_time for c in world.status.conditions}
    assert after["Accepted"] == before["Accepted"]
    assert after["Progressing"] == clock.to_text(world.now) != before["Progressing"]


def test_backoff_counts_from_the_failure_even_if_the_operator_was_away() -> None:
    world = start_job()
    world.finish(world.alive()[0], "Failed")
    world.control()
    world.tick(3600)
    world.carry_out(world.plan())
    assert world.plan().apply


def test_each_failed_execution_has_an_event() -> None:
    world = start_job(spec__restart={"maxRestarts": 5, "backoffSeconds": 0})
    for _ in range(2):
        fail_execution(world)
        world.wait_out()
        world.settle()
        world.control()
        world.settle()
    assert list(world.events.values()).count("ExecutionFailed") == 2
    assert list(world.events.values()).count("RestartStarted") == 2


def test_event_names_sort_in_the_order_of_events() -> None:
    world = start_job(spec__restart={"maxRestarts": 5, "backoffSeconds": 0})
    fail_execution(world)
    world.run_fairly()
    assert [world.events[name] for name in sorted(world.events)] == [
        "Accepted",
        "PhaseStarted",
        "ExecutionFailed",
        "RestartStarted",
        "PhaseCompleted",
        "DelinkStarted",
        "DelinkCompleted",
        "PhaseStarted",
        "PhaseCompleted",
        "Completed",
    ]


def test_final_failure_names_the_command_to_read_logs() -> None:
    world = start_job(spec__restart={"maxRestarts": 0})
    fail_execution(world, exit_code=139)
    assert condition_states(world)["Failed"] == ("True", "RestartsExhausted")
    assert "exit code 139" in condition_message(world, "Failed")
    assert "kubectl logs -n default -l pseudoreal.dev/job-name=sim" in condition_message(world, "Failed")
    assert world.status.phases[0].state == "Failed"
    assert world.status.completion_time == clock.to_text(world.now)


def test_job_that_the_trainer_rejects_fails_with_the_trainers_message() -> None:
    world = start_job()
    fail_execution(world, outcome="InvalidJob")
    assert condition_states(world)["Failed"] == ("True", "InvalidJob")
    assert condition_message(world, "Failed") == "it InvalidJob"
    assert world.status.restarts == 0


@pytest.mark.parametrize("stage", ["pseudo", "real-delink", "real"])
def test_stage_whose_result_was_deleted_runs_again_without_counting(stage: str) -> None:
    world = start_job(spec__restart={"backoffSeconds": 0})
    while f"sim-{stage}-e1" not in world.active_jobs():
        world.finish_all()
        world.settle()
        world.control()
    world.finish_all()
    world.pods.clear()
    world.settle()
    assert world.active_jobs() == [f"sim-{stage}-e2"]
    assert world.status.restarts == 0
    world.run_fairly()
    assert world.status.phases[1].start_checkpoint == "real-20"
    assert world.status.state == "Complete"


def test_invalid_spec_fails_a_new_job() -> None:
    world = World(make_job(spec__phases__1__workers=9, spec__phases__1__parallelism={"pipeline": "AllRanks"}))
    world.settle()
    assert condition_states(world)["Accepted"] == ("False", "InvalidSpec")
    assert "9 ranks, more than spec.model.layers 8" in condition_message(world, "Failed")
    assert world.objects == {}


def test_active_deadline_fails_the_job_and_ends_its_pods() -> None:
    world = start_job(spec__deadlines={"activeSeconds": 60})
    assert (world.plan().requeue_after or 0) <= 60
    world.tick(60)
    world.carry_out(world.plan())
    assert condition_states(world)["Failed"] == ("True", "DeadlineExceeded")
    assert [*map(bare, world.plan().delete)] == ["sim-pseudo-e1"], "once the status says why"


def test_suspended_condition_says_how_to_resume() -> None:
    world = start_job()
    world.set(suspend=True)
    wanted = world.plan()
    assert [*map(bare, wanted.delete)] == ["sim-pseudo-e1"]
    world.carry_out(wanted)
    assert world.status.state == "Suspended"
    assert "Set it to false" in condition_message(world, "Suspended")


def test_new_execution_waits_for_pods_of_the_previous_one() -> None:
    world = start_job(spec__restart={"backoffSeconds": 0})
    del world.objects["Job", "sim-pseudo-e1"]
    world.settle()
    assert world.active_jobs() == []
    assert condition_states(world)["Progressing"] == ("False", "AwaitingCleanup")
    (pod,) = world.alive()
    assert f"kubectl delete pod {pod['metadata']['name']} -n default --force" in condition_message(world, "Progressing")
    world.vanish(pod)
    world.settle()
    assert world.active_jobs() == ["sim-pseudo-e2"]


def test_children_of_a_deleted_job_of_the_same_name_are_waited_for() -> None:
    world = World(make_job())
    world.carry_out(world.plan())
    wanted = plan(replace(world.observe(), objects_of_deleted_job=("sim-pseudo-e1",)), world.now, SETTINGS)
    assert wanted.apply == ()
    assert any("sim-pseudo-e1 of a deleted job" in c.message for c in wanted.status.conditions)


def test_active_job_that_is_being_deleted_counts_as_deleted() -> None:
    world = start_job()
    seen = world.observe()
    dying = tuple(replace(job, deleting=True) for job in seen.jobs)
    wanted = plan(replace(seen, jobs=dying), world.now, SETTINGS)
    assert (wanted.status.execution, wanted.delete) == (2, ())


def test_job_of_another_execution_is_deleted() -> None:
    world = start_job()
    stray = ChildJob("sim-real-e1", Execution("real", StageKind.TRAIN, 1), JobState.ACTIVE)
    seen = world.observe()
    assert plan(replace(seen, jobs=(*seen.jobs, stray)), world.now, SETTINGS).delete == ("sim-real-e1",)


def test_execution_number_is_recovered_from_the_children() -> None:
    world = start_job(spec__restart={"backoffSeconds": 0})
    fail_execution(world)
    world.settle()
    assert world.status.execution == 2
    world.status = World(make_job()).status
    assert world.plan().status.execution == 2


def report(step: int, **changes: Any) -> ProgressReport:
    values: dict[str, Any] = {
        "phase": "pseudo",
        "step": step,
        "total_steps": 20,
        "tokens": step * 256,
        "loss": 2.71828,
        "validation_loss": 3.14159,
        "learning_rate": 1e-3,
        "tokens_per_second": 1234.5,
        "seconds": 1.0,
        "remaining_seconds": 9.6,
        "global_cursor": step * 8,
    }
    return ProgressReport.model_validate(values | changes)


def last_reports(world: World, step: int) -> tuple[LastReport, ...]:
    sign = RankReport(rank=0, activity="computing", seconds=0, step=step)
    pod_report = PodReport(ranks=[sign], progress=report(step))
    (pod,) = world.observe().pods
    return (LastReport(pod.execution, 0, pod.name, world.now, world.now, pod_report, training_since=world.now),)


def test_progress_comes_from_reports_and_stays_when_there_is_none() -> None:
    world = start_job()
    world.status = plan(replace(world.observe(), last_reports=last_reports(world, 5)), world.now, SETTINGS).status
    progress = world.status.progress
    assert progress
    assert (progress.step, progress.percent, progress.loss, progress.validation_loss) == (5, 25, "2.7183", "3.1416")
    assert (progress.phase_remaining_seconds, progress.tokens_per_second) == (10, "1234")
    assert world.plan().status == world.status


def test_the_load_of_experts_is_in_the_progress_until_the_phase_ends() -> None:
    world = start_job()
    figures = {"expert_load_max": 1.5, "idle_experts": 0.25, "dropped_tokens": 0.031251, "router_entropy": 1.38629}
    (said,) = last_reports(world, 5)
    known = replace(said, report=said.report.model_copy(update={"progress": report(5, **figures)}))
    world.status = plan(replace(world.observe(), last_reports=(known,)), world.now, SETTINGS).status
    assert world.status.progress
    expected = {"largest": "1.5000", "idle": "0.2500", "dropped": "0.0313", "routerEntropy": "1.3863"}
    assert world.status.progress.model_dump(by_alias=True)["experts"] == expected
    world.finish_all()
    ended = world.plan().status.progress
    assert ended
    assert (ended.step, ended.experts) == (10, world.status.progress.experts)


def test_progress_without_experts_has_no_load() -> None:
    """Progress of an older trainer, which reports only some of the figures, has none either."""
    world = start_job()
    (said,) = last_reports(world, 5)
    older = replace(said, report=said.report.model_copy(update={"progress": report(5, expert_load_max=1.5)}))
    for each in (said, older):
        progress = plan(replace(world.observe(), last_reports=(each,)), world.now, SETTINGS).status.progress
        assert progress
        assert progress.experts is None


def test_progress_alone_is_written_at_most_every_ten_seconds() -> None:
    world = start_job()
    world.status = plan(replace(world.observe(), last_reports=last_reports(world, 5)), world.now, SETTINGS).status
    world.tick(9)
    assert (
        plan(replace(world.observe(), last_reports=last_reports(world, 6)), world.now, SETTINGS).status == world.status
    )
    world.tick(1)
    assert (
        plan(replace(world.observe(), last_reports=last_reports(world, 5)), world.now, SETTINGS).status == world.status
    )
    moved = plan(replace(world.observe(), last_reports=last_reports(world, 6)), world.now, SETTINGS).status
    assert moved.progress
    assert moved.progress.step == 6


def test_progress_is_written_at_once_with_a_transition() -> None:
    world = start_job()
    world.status = plan(replace(world.observe(), last_reports=last_reports(world, 5)), world.now, SETTINGS).status
    world.run_fairly()
    assert world.status.progress
    assert (world.status.progress.step, world.status.progress.percent) == (20, 100)


def test_invalid_children_fail_a_new_job() -> None:
    world = World(make_job())
    world.carry_out(world.plan())
    wanted = plan_rejected(world.observe(), "spec.template: wrong", world.now)
    assert wanted.status.state == "Failed"
    assert wanted.apply == ()
    assert [event.reason.value for event in wanted.events] == ["Failed"]


def test_invalid_children_block_a_job_that_has_begun() -> None:
    world = start_job()
    fail_execution(world)
    world.carry_out(plan_rejected(world.observe(), "a new policy denies it", world.now))
    assert condition_states(world)["Progressing"] == ("False", "Blocked")
    assert "Failed" not in condition_states(world)
    world.run_fairly()
    assert world.status.state == "Complete"


def test_temporary_rejection_is_shown_as_blocked() -> None:
    world = start_job()
    before = condition_states(world)
    wanted = plan_blocked(world.observe(), "exceeded quota", world.now)
    assert wanted.status.execution == world.status.execution
    assert wanted.requeue_after
    world.carry_out(wanted)
    assert condition_states(world) == before | {"Progressing": ("False", "Blocked")}
    assert condition_message(world, "Progressing") == "exceeded quota"


@pytest.mark.parametrize("outcome", ["Succeeded", "InvalidJob"])
def test_rejection_after_the_end_changes_no_outcome(outcome: Outcome) -> None:
    world = run_until(World(make_job(spec__cleanUp={"children": "Delete"})), "real")
    for pod in world.alive():
        world.finish(pod, outcome)
    world.control()
    world.settle()
    ended = world.status
    assert ended.completion_time
    for refused in (plan_blocked, plan_rejected):
        wanted = refused(world.observe(), "the server is shutting down", world.now)
        assert (wanted.status, wanted.events) == (ended, ())
        assert wanted.requeue_after, "the clean-up is tried again"


def test_unreadable_job_waits_and_its_pods_keep_running() -> None:
    world = start_job()
    before = condition_states(world)
    world.carry_out(plan_unreadable(world.job.metadata, world.status, "spec.new: unknown", world.now))
    assert condition_states(world) == before | {"Progressing": ("False", "Unreadable")}
    assert world.active_jobs() == ["sim-pseudo-e1"]
    world.run_fairly()
    assert world.status.state == "Complete"
    ended = world.status
    assert plan_unreadable(world.job.metadata, ended, "spec.new: unknown", world.now).status == ended


@pytest.mark.parametrize("state", ["Validating", "Paused"])
def test_a_state_of_a_later_release_does_not_end_a_pass(state: str) -> None:
    """Such a state occurs after the operator was rolled back."""
    world = start_job()
    newer = world.status.to_dict()
    newer["phases"][0]["state"] = state
    world.status = type(world.status).model_validate(newer)
    world.settle()
    assert world.active_jobs() == ["sim-pseudo-e1"]
    world.run_fairly()
    assert world.status.state == "Complete"


def test_job_that_was_unreadable_at_first_starts_normally() -> None:
    world = World(make_job())
    world.carry_out(plan_unreadable(world.job.metadata, world.status, "spec.new: unknown", world.now))
    world.run_fairly()
    assert world.status.state == "Complete"
    assert next(iter(world.events.values())) == "Accepted"


def test_unreadable_result_counts_as_a_restart_and_deleted_result_does_not() -> None:
    world = start_job(spec__restart={"backoffSeconds": 0})
    (pod,) = world.alive()
    world.finish(pod, exit_code=0)
    world.control()
    world.carry_out(world.plan())
    assert [(fault.reason, fault.pod) for fault in world.status.faults] == [
        ("ResultUnreadable", pod["metadata"]["name"])
    ]
    run_pods(world)
    (pod,) = world.alive()
    world.finish(pod)
    world.control()
    world.vanish(pod)
    world.carry_out(world.plan())
    assert (world.status.execution, world.status.restarts) == (3, 1)
    assert "was deleted, and its result with it" in condition_message(world, "Progressing")


def test_stage_that_completed_before_the_deadline_counts_when_seen_later() -> None:
    world = run_until(World(make_job(spec__deadlines={"activeSeconds": 1000})), "real")
    world.finish_all()
    world.tick(2000)
    world.settle()
    assert world.status.state == "Complete"


def test_startup_deadline_runs_even_if_execution_time_was_not_written() -> None:
    world = World(make_job(spec__deadlines={"startupSeconds": 60, "onStartupTimeout": "Fail"}))
    world.carry_out(world.plan())
    wanted = world.plan()
    world.carry_out(wanted, len(wanted.apply))
    world.settle()
    assert world.active_jobs() == ["sim-pseudo-e1"]
    world.tick(61)
    world.settle()
    assert condition_states(world)["Failed"] == ("True", "StartupDeadlineExceeded")


def test_only_the_newest_failed_jobs_are_kept() -> None:
    world = start_job(spec__restart={"backoffSeconds": 0, "maxRestarts": 99})
    for _ in range(8):
        fail_execution(world)
        world.wait_out()
        run_pods(world)
    names = sorted(name for kind, name in world.objects if kind == "Job")
    assert names == [f"sim-pseudo-e{number}" for number in range(4, 10)]
