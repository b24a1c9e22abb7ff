"""Time of the next pass over a job: when a clock runs out, or not before something changes; and what remains known
of deleted pods."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from pseudoreal_api.wire.messages import TerminationMessage
from pseudoreal_api.wire.reports import PodReport, RankReport, SavedCheckpoint
from pseudoreal_operator import clock
from pseudoreal_operator.lifecycle.clocks import ORIGIN_SECONDS, STUCK_SECONDS
from pseudoreal_operator.lifecycle.plan import PROGRESS_SECONDS, Plan, plan
from pseudoreal_operator.lifecycle.rules import UNWATCHED_SECONDS
from pseudoreal_operator.observe.view import NO_PODS, LastReport, Observed, Pod, PodPhase, Termination

from tests.unit.operator.lifecycle.support.steps import run_until, start_job
from tests.unit.operator.observe.support.reports import progress
from tests.unit.operator.support.world import SETTINGS, World, make_job

LOST_PEER: dict[str, Any] = {"outcome": "Failed", "peer_lost": True}


def plan_of(world: World, seen: Observed) -> Plan:
    return plan(seen, world.now, SETTINGS)


def ended_pod(world: World, step: int, outcome: Any = "Yielded", phase: PodPhase = PodPhase.FAILED) -> Pod:
    """Return a pod of the present execution, as its watch last reported it."""
    (execution,) = {job.execution for job in world.observe().jobs} or {world.observe().pods[0].execution}
    message = TerminationMessage(
        outcome=outcome,
        phase=execution.phase,
        execution=execution.number,
        step=step,
        checkpoint=f"pseudo-{step}",
        loss=1.0,
        validation_loss=1.5,
    )
    return Pod("gone", execution, 0, phase, termination=Termination(75, "Error", "", message))


def report_of_checkpoint(world: World, step: int) -> LastReport:
    (pod,) = world.observe().pods
    report = PodReport(
        ranks=[RankReport(rank=0, activity="ended", seconds=0, step=step)],
        checkpoint=SavedCheckpoint(name=f"pseudo-{step}", step=step, seconds=0),
    )
    return LastReport(
        pod.execution, 0, pod.name, first=world.now, last=world.now, report=report, training_since=world.now
    )


def latest_checkpoint(wanted: Plan) -> str | None:
    return wanted.status.checkpoint.latest if wanted.status.checkpoint else None


def test_unchanged_job_gets_no_pass_while_running_or_suspended() -> None:
    world = start_job()
    assert world.plan().requeue_after is None
    world.set(suspend=True)
    world.settle()
    assert world.plan().requeue_after is None
    for pod in world.alive():
        world.vanish(pod)
    world.settle()
    assert world.plan().requeue_after is None


def test_ended_job_gets_no_pass() -> None:
    world = World(make_job())
    world.run_fairly()
    assert (world.status.state, world.plan().requeue_after) == ("Complete", None)


@pytest.mark.parametrize(
    ("limits", "wait"),
    [
        ({"spec__hang": {"startSeconds": 7}}, 7.1),
        ({"spec__hang": {"startSeconds": 7}, "spec__deadlines": {"activeSeconds": 5}}, 5),
    ],
)
def test_requeue_comes_when_a_clock_runs_out(limits: dict[str, Any], wait: float) -> None:
    world = start_job(**limits)
    (pod,) = world.alive()
    world.report(pod, 0, "starting")
    assert world.plan().requeue_after == pytest.approx(wait)


def test_postponed_progress_is_written_when_due() -> None:
    world = start_job(spec__hang={"stepSeconds": 1000})
    (pod,) = world.observe().pods

    def said(step: int) -> Observed:
        report = PodReport(ranks=[RankReport(rank=0, activity="ended", seconds=0, step=step)], progress=progress(step))
        return replace(
            world.observe(),
            last_reports=(
                LastReport(pod.execution, 0, pod.name, world.now, world.now, report, training_since=world.now),
            ),
        )

    world.carry_out(plan_of(world, said(1)))
    assert plan_of(world, said(1)).requeue_after is None
    world.tick(3)
    wanted = plan_of(world, said(2))
    assert (wanted.status, wanted.requeue_after) == (world.status, PROGRESS_SECONDS - 3)
    world.tick(PROGRESS_SECONDS - 3)
    wanted = plan_of(world, said(2))
    assert wanted.status.progress is not None
    assert (wanted.status.progress.step, wanted.requeue_after) == (2, None)


def test_met_deadline_causes_no_requeue() -> None:
    world = start_job(spec__deadlines={"startupSeconds": 9})
    assert world.plan().requeue_after is None


def test_step_clock_restarts_with_each_step() -> None:
    world = start_job(spec__hang={"stepSeconds": 30})
    (pod,) = world.alive()
    for step in (1, 2):
        world.report(pod, step)
        assert world.plan().requeue_after == pytest.approx(30.1)
        world.tick(20)
    assert world.plan().requeue_after == pytest.approx(10.1)
    world.tick(10.1)
    world.report(pod, 2)
    assert world.plan().status.execution == 2


def test_requeue_comes_at_the_startup_deadline() -> None:
    world = World(make_job(spec__deadlines={"startupSeconds": 9}))
    world.settle()
    world.control()
    world.settle()
    world.tick(2)
    assert world.plan().requeue_after == 7


def test_requeue_comes_when_a_peer_lost_pod_or_a_terminating_pod_is_due() -> None:
    world = run_until(World(make_job()), "real")
    first, second = world.alive()
    world.finish(first, **LOST_PEER)
    world.settle()
    assert world.plan().requeue_after == ORIGIN_SECONDS
    second["metadata"]["deletionTimestamp"] = clock.to_text(world.now - timedelta(seconds=STUCK_SECONDS - 2))
    assert world.plan().requeue_after == 2


def test_cleanup_polls_only_for_objects_that_are_not_watched() -> None:
    world = start_job(spec__restart={"backoffSeconds": 0})
    world.objects.pop(("Job", world.active_jobs()[0]))
    world.carry_out(world.plan())
    world.tick(60)
    assert (world.plan().apply, world.plan().requeue_after) == ((), None), "the pod of the deleted Job runs"
    seen = replace(world.observe(), pods=NO_PODS, objects_of_deleted_job=("sim-pseudo-e2",))
    assert plan_of(world, seen).requeue_after == UNWATCHED_SECONDS


def test_suspended_job_shows_the_checkpoint_of_a_deleted_pod() -> None:
    """From the termination message that the watch reported, or from the pod's last report, whichever is newer."""
    world = start_job()
    report, words = report_of_checkpoint(world, 7), ended_pod(world, 9)
    world.set(suspend=True)
    world.settle()
    seen = replace(world.observe(), pods=NO_PODS)
    assert latest_checkpoint(plan_of(world, seen)) is None
    assert latest_checkpoint(plan_of(world, replace(seen, last_reports=(report,)))) == "pseudo-7"
    for deleted in ((words,), ()):
        wanted = plan_of(world, replace(seen, last_reports=(report,), deleted_pods=deleted))
        assert latest_checkpoint(wanted) == "pseudo-9", "an older report takes nothing back"
        seen = replace(seen, status=wanted.status)


def test_result_of_a_deleted_pod_is_used() -> None:
    world = start_job()
    words = ended_pod(world, 10, "Succeeded", PodPhase.SUCCEEDED)
    world.finish_all()
    seen = replace(world.observe(), pods=NO_PODS, deleted_pods=(words,))
    wanted = plan_of(world, seen)
    assert (wanted.status.phases[0].state, wanted.status.phases[0].end_checkpoint) == ("Complete", "pseudo-10")
    assert plan_of(world, replace(seen, deleted_pods=NO_PODS)).status.execution == 2, "without it the phase runs again"
