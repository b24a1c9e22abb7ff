"""Single decisions of the plan, and their traces in the status and the events."""

from dataclasses import replace
from typing import Any

import pytest
from pseudoreal_api.wire.messages import Outcome, ProgressReport
from pseudoreal_api.wire.reports import PodReport, RankReport
from pseudoreal_operator import clock
from pseudoreal_operator.lifecycle.plan import plan, plan_blocked, plan_refusal, plan_unreadable
from pseudoreal_operator.observe.stages import Execution, StageKind
from pseudoreal_operator.observe.view import ChildJob, JobState, LastReport

from tests.support.names import bare
from tests.unit.operator.lifecycle.support.steps import begun, claims, fail_execution, message, run_pods, until
from tests.unit.operator.support.world import SETTINGS, World, make_job


def test_the_first_pass_writes_the_status_and_makes_nothing() -> None:
    first = World(make_job()).plan()
    assert first.apply == ()
    assert (first.status.execution, [phase.state for phase in first.status.phases]) == (
        1,
        ["Pending", "Pending"],
    )
    assert first.requeue_after == 0


def test_the_conditions_of_a_job_that_trains() -> None:
    world = begun()
    assert claims(world) == {
        "Accepted": ("True", "Valid"),
        "Progressing": ("True", "Training"),
        "Delinked": ("False", "Pending"),
        "Suspended": ("False", "NotRequested"),
    }
    assert (world.status.current_phase, world.status.replicas.desired, world.status.replicas.ready) == ("pseudo", 1, 1)


def test_pods_that_have_all_done_their_part_are_no_news_before_their_job_says_so() -> None:
    world = begun()
    for pod in world.alive():
        world.finish(pod, "Succeeded")
    assert world.plan().status == world.status
    world.control()
    world.settle()
    assert (world.status.phases[0].state, world.status.replicas.ready) == ("Complete", 0)


def test_the_conditions_of_a_job_that_is_done() -> None:
    world = begun()
    world.run_fairly()
    found = claims(world)
    assert found["Complete"][0] == "True"
    assert found["Delinked"] == ("True", "Completed")
    assert found["Progressing"][0] == "False"
    assert "Failed" not in found, "the printer column would show its reason"


def test_a_job_of_one_phase_needs_no_delink() -> None:
    phase = {"name": "only", "until": {"step": 10}, "batch": {"sequences": 8}}
    world = begun(spec__phases=[phase])
    assert claims(world)["Delinked"] == ("True", "NotNeeded")
    world.run_fairly()
    assert world.status.state == "Complete"


def test_a_transition_time_moves_only_with_the_status() -> None:
    world = begun()
    before = {c.type: c.last_transition_time for c in world.status.conditions}
    world.tick(60)
    fail_execution(world)
    after = {c.type: c.last_transition_time for c in world.status.conditions}
    assert after["Accepted"] == before["Accepted"]
    assert after["Progressing"] == clock.to_text(world.now) != before["Progressing"]


def test_an_operator_that_was_away_does_not_wait_again() -> None:
    world = begun()
    world.finish(world.alive()[0], "Failed")
    world.control()
    world.tick(3600)
    world.carry_out(world.plan())
    assert world.plan().apply


def test_each_failed_execution_has_its_event() -> None:
    world = begun(spec__restart={"maxRestarts": 5, "backoffSeconds": 0})
    for _ in range(2):
        fail_execution(world)
        world.wait_out()
        world.settle()
        world.control()
        world.settle()
    assert list(world.events.values()).count("ExecutionFailed") == 2
    assert list(world.events.values()).count("RestartStarted") == 2


def test_event_names_sort_in_the_order_of_the_story() -> None:
    world = begun(spec__restart={"maxRestarts": 5, "backoffSeconds": 0})
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


def test_the_last_failure_says_what_to_look_at() -> None:
    world = begun(spec__restart={"maxRestarts": 0})
    fail_execution(world, exit_code=139)
    assert claims(world)["Failed"] == ("True", "RestartsExhausted")
    assert "exit code 139" in message(world, "Failed")
    assert "kubectl logs -n default -l pseudoreal.dev/job-name=sim" in message(world, "Failed")
    assert world.status.phases[0].state == "Failed"
    assert world.status.completion_time == clock.to_text(world.now)


def test_what_the_trainer_refuses_ends_the_job_in_its_own_words() -> None:
    world = begun()
    fail_execution(world, outcome="InvalidJob")
    assert claims(world)["Failed"] == ("True", "InvalidJob")
    assert message(world, "Failed") == "it InvalidJob"
    assert world.status.restarts == 0


@pytest.mark.parametrize("stage", ["pseudo", "real-delink", "real"])
def test_a_stage_whose_result_is_gone_runs_again_and_does_not_count(stage: str) -> None:
    world = begun(spec__restart={"backoffSeconds": 0})
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


def test_a_job_that_cannot_be_resolved_is_refused_at_first_sight() -> None:
    world = World(make_job(spec__phases__1__workers=9, spec__phases__1__parallelism={"pipeline": "AllRanks"}))
    world.settle()
    assert claims(world)["Accepted"] == ("False", "InvalidSpec")
    assert "9 ranks, more than spec.model.layers 8" in message(world, "Failed")
    assert world.objects == {}


def test_a_deadline_ends_the_job_and_frees_its_pods() -> None:
    world = begun(spec__deadlines={"activeSeconds": 60})
    assert (world.plan().requeue_after or 0) <= 60
    world.tick(60)
    world.carry_out(world.plan())
    assert claims(world)["Failed"] == ("True", "DeadlineExceeded")
    assert [*map(bare, world.plan().delete)] == ["sim-pseudo-e1"], "once the status says why"


def test_suspending_says_how_to_go_on() -> None:
    world = begun()
    world.set(suspend=True)
    wanted = world.plan()
    assert [*map(bare, wanted.delete)] == ["sim-pseudo-e1"]
    world.carry_out(wanted)
    assert world.status.state == "Suspended"
    assert "Set it to false" in message(world, "Suspended")


def test_the_next_execution_waits_for_the_pods_of_the_last() -> None:
    world = begun(spec__restart={"backoffSeconds": 0})
    del world.objects["Job", "sim-pseudo-e1"]
    world.settle()
    assert world.active_jobs() == []
    assert claims(world)["Progressing"] == ("False", "AwaitingCleanup")
    (pod,) = world.alive()
    assert f"kubectl delete pod {pod['metadata']['name']} -n default --force" in message(world, "Progressing")
    world.vanish(pod)
    world.settle()
    assert world.active_jobs() == ["sim-pseudo-e2"]


def test_children_of_a_deleted_job_of_the_same_name_are_waited_for() -> None:
    world = World(make_job())
    world.carry_out(world.plan())
    wanted = plan(replace(world.observe(), foreign=("sim-pseudo-e1",)), world.now, SETTINGS)
    assert wanted.apply == ()
    assert any("sim-pseudo-e1 of a deleted job" in c.message for c in wanted.status.conditions)


def test_a_job_that_somebody_deletes_while_it_runs_counts_as_gone() -> None:
    world = begun()
    seen = world.observe()
    dying = tuple(replace(job, deleting=True) for job in seen.jobs)
    wanted = plan(replace(seen, jobs=dying), world.now, SETTINGS)
    assert (wanted.status.execution, wanted.delete) == (2, ())


def test_a_stray_execution_is_ended() -> None:
    world = begun()
    stray = ChildJob("sim-real-e1", Execution("real", StageKind.TRAIN, 1), JobState.ACTIVE)
    seen = world.observe()
    assert plan(replace(seen, jobs=(*seen.jobs, stray)), world.now, SETTINGS).delete == ("sim-real-e1",)


def test_a_lost_status_takes_the_execution_from_the_children() -> None:
    world = begun(spec__restart={"backoffSeconds": 0})
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
    return (LastReport(pod.execution, 0, pod.name, world.now, world.now, pod_report, begun=world.now),)


def test_progress_comes_from_reports_and_stays_when_there_is_none() -> None:
    world = begun()
    world.status = plan(replace(world.observe(), last_reports=last_reports(world, 5)), world.now, SETTINGS).status
    progress = world.status.progress
    assert progress
    assert (progress.step, progress.percent, progress.loss, progress.validation_loss) == (5, 25, "2.7183", "3.1416")
    assert (progress.phase_remaining_seconds, progress.tokens_per_second) == (10, "1234")
    assert world.plan().status == world.status


def test_the_load_of_experts_is_in_the_progress_until_the_phase_ends() -> None:
    world = begun()
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
    world = begun()
    (said,) = last_reports(world, 5)
    older = replace(said, report=said.report.model_copy(update={"progress": report(5, expert_load_max=1.5)}))
    for each in (said, older):
        progress = plan(replace(world.observe(), last_reports=(each,)), world.now, SETTINGS).status.progress
        assert progress
        assert progress.experts is None


def test_progress_alone_is_written_every_ten_seconds_and_when_it_moves() -> None:
    world = begun()
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


def test_progress_goes_along_with_a_transition_at_once() -> None:
    world = begun()
    world.status = plan(replace(world.observe(), last_reports=last_reports(world, 5)), world.now, SETTINGS).status
    world.run_fairly()
    assert world.status.progress
    assert (world.status.progress.step, world.status.progress.percent) == (20, 100)


def test_what_the_api_server_refuses_for_good_fails_the_job() -> None:
    world = World(make_job())
    world.carry_out(world.plan())
    wanted = plan_refusal(world.observe(), "spec.template: wrong", world.now)
    assert wanted.status.state == "Failed"
    assert wanted.apply == ()
    assert [event.reason.value for event in wanted.events] == ["Failed"]


def test_a_stage_that_was_accepted_once_is_not_given_up_for_a_refusal() -> None:
    world = begun()
    fail_execution(world)
    world.carry_out(plan_refusal(world.observe(), "a new policy denies it", world.now))
    assert claims(world)["Progressing"] == ("False", "Blocked")
    assert "Failed" not in claims(world)
    world.run_fairly()
    assert world.status.state == "Complete"


def test_what_the_api_server_refuses_for_now_is_said() -> None:
    world = begun()
    before = claims(world)
    wanted = plan_blocked(world.observe(), "exceeded quota", world.now)
    assert wanted.status.execution == world.status.execution
    assert wanted.requeue_after
    world.carry_out(wanted)
    assert claims(world) == before | {"Progressing": ("False", "Blocked")}
    assert message(world, "Progressing") == "exceeded quota"


@pytest.mark.parametrize("outcome", ["Succeeded", "InvalidJob"])
def test_a_refusal_after_the_end_takes_nothing_back(outcome: Outcome) -> None:
    world = until(World(make_job(spec__cleanUp={"children": "Delete"})), "real")
    for pod in world.alive():
        world.finish(pod, outcome)
    world.control()
    world.settle()
    ended = world.status
    assert ended.completion_time
    for refused in (plan_blocked, plan_refusal):
        wanted = refused(world.observe(), "the server is shutting down", world.now)
        assert (wanted.status, wanted.events) == (ended, ())
        assert wanted.requeue_after, "the clean-up is tried again"


def test_a_job_that_cannot_be_read_waits_and_its_pods_run_on() -> None:
    world = begun()
    before = claims(world)
    world.carry_out(plan_unreadable(world.job.metadata, world.status, "spec.new: unknown", world.now))
    assert claims(world) == before | {"Progressing": ("False", "Unreadable")}
    assert world.active_jobs() == ["sim-pseudo-e1"]
    world.run_fairly()
    assert world.status.state == "Complete"
    ended = world.status
    assert plan_unreadable(world.job.metadata, ended, "spec.new: unknown", world.now).status == ended


@pytest.mark.parametrize("state", ["Validating", "Paused"])
def test_a_state_of_a_later_release_does_not_end_a_pass(state: str) -> None:
    """Such a state occurs after the operator was rolled back."""
    world = begun()
    newer = world.status.to_dict()
    newer["phases"][0]["state"] = state
    world.status = type(world.status).model_validate(newer)
    world.settle()
    assert world.active_jobs() == ["sim-pseudo-e1"]
    world.run_fairly()
    assert world.status.state == "Complete"


def test_a_job_that_could_not_be_read_at_first_begins_as_any_other() -> None:
    world = World(make_job())
    world.carry_out(plan_unreadable(world.job.metadata, world.status, "spec.new: unknown", world.now))
    world.run_fairly()
    assert world.status.state == "Complete"
    assert next(iter(world.events.values())) == "Accepted"


def test_a_result_that_cannot_be_read_counts_and_one_that_is_gone_does_not() -> None:
    world = begun(spec__restart={"backoffSeconds": 0})
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
    assert "is gone, with its result" in message(world, "Progressing")


def test_what_was_done_before_the_deadline_counts_though_it_is_seen_after_it() -> None:
    world = until(World(make_job(spec__deadlines={"activeSeconds": 1000})), "real")
    world.finish_all()
    world.tick(2000)
    world.settle()
    assert world.status.state == "Complete"


def test_the_clock_of_the_start_runs_though_nobody_wrote_when_it_began() -> None:
    world = World(make_job(spec__deadlines={"startupSeconds": 60, "onStartupTimeout": "Fail"}))
    world.carry_out(world.plan())
    wanted = world.plan()
    world.carry_out(wanted, len(wanted.apply))
    world.settle()
    assert world.active_jobs() == ["sim-pseudo-e1"]
    world.tick(61)
    world.settle()
    assert claims(world)["Failed"] == ("True", "StartupDeadlineExceeded")


def test_only_the_newest_failed_jobs_are_kept() -> None:
    world = begun(spec__restart={"backoffSeconds": 0, "maxRestarts": 99})
    for _ in range(8):
        fail_execution(world)
        world.wait_out()
        run_pods(world)
    names = sorted(name for kind, name in world.objects if kind == "Job")
    assert names == [f"sim-pseudo-e{number}" for number in range(4, 10)]
