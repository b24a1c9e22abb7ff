"""Time of the next pass over a job: when a clock runs out, or not before something changes; and what remains known
of deleted pods."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from pseudoreal_api.wire.messages import TerminationMessage
from pseudoreal_api.wire.reports import PodReport, RankReport, SavedCheckpoint
from pseudoreal_operator import clock
from pseudoreal_operator.lifecycle.plan import PROGRESS_SECONDS, Plan, plan
from pseudoreal_operator.lifecycle.rules import UNWATCHED_SECONDS
from pseudoreal_operator.lifecycle.stopping import ORIGIN_SECONDS, STUCK_SECONDS
from pseudoreal_operator.observe.view import LastReport, Observed, Pod, PodPhase, Termination

from tests.unit.operator.lifecycle.support.steps import begun, until
from tests.unit.operator.observe.support.reports import progress
from tests.unit.operator.support.world import SETTINGS, World, make_job

LOST_PEER: dict[str, Any] = {"outcome": "Failed", "peer_lost": True}


def planned(world: World, seen: Observed) -> Plan:
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


def saved(world: World, step: int) -> LastReport:
    (pod,) = world.observe().pods
    report = PodReport(
        ranks=[RankReport(rank=0, activity="ended", seconds=0, step=step)],
        checkpoint=SavedCheckpoint(name=f"pseudo-{step}", step=step, seconds=0),
    )
    return LastReport(pod.execution, 0, pod.name, first=world.now, last=world.now, report=report, begun=world.now)


def latest(wanted: Plan) -> str | None:
    return wanted.status.checkpoint.latest if wanted.status.checkpoint else None


def test_a_job_is_not_looked_at_before_something_changes_whether_it_runs_or_is_suspended() -> None:
    world = begun()
    assert world.plan().requeue_after is None
    world.set(suspend=True)
    world.settle()
    assert world.plan().requeue_after is None
    for pod in world.alive():
        world.vanish(pod)
    world.settle()
    assert world.plan().requeue_after is None


def test_a_job_that_has_ended_is_not_looked_at() -> None:
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
def test_a_clock_that_runs_out_wakes_the_job(limits: dict[str, Any], wait: float) -> None:
    world = begun(**limits)
    (pod,) = world.alive()
    world.report(pod, 0, "starting")
    assert world.plan().requeue_after == pytest.approx(wait)


def test_progress_that_came_too_soon_is_written_when_it_is_due() -> None:
    world = begun(spec__hang={"stepSeconds": 1000})
    (pod,) = world.observe().pods

    def said(step: int) -> Observed:
        report = PodReport(ranks=[RankReport(rank=0, activity="ended", seconds=0, step=step)], progress=progress(step))
        return replace(
            world.observe(),
            last_reports=(LastReport(pod.execution, 0, pod.name, world.now, world.now, report, begun=world.now),),
        )

    world.carry_out(planned(world, said(1)))
    assert planned(world, said(1)).requeue_after is None
    world.tick(3)
    wanted = planned(world, said(2))
    assert (wanted.status, wanted.requeue_after) == (world.status, PROGRESS_SECONDS - 3)
    world.tick(PROGRESS_SECONDS - 3)
    wanted = planned(world, said(2))
    assert wanted.status.progress is not None
    assert (wanted.status.progress.step, wanted.requeue_after) == (2, None)


def test_a_deadline_that_was_kept_wakes_nobody() -> None:
    world = begun(spec__deadlines={"startupSeconds": 9})
    assert world.plan().requeue_after is None


def test_the_clock_of_a_step_starts_with_each_of_them() -> None:
    world = begun(spec__hang={"stepSeconds": 30})
    (pod,) = world.alive()
    for step in (1, 2):
        world.report(pod, step)
        assert world.plan().requeue_after == pytest.approx(30.1)
        world.tick(20)
    assert world.plan().requeue_after == pytest.approx(10.1)
    world.tick(10.1)
    world.report(pod, 2)
    assert world.plan().status.execution == 2


def test_pods_that_do_not_start_wake_the_job_at_their_deadline() -> None:
    world = World(make_job(spec__deadlines={"startupSeconds": 9}))
    world.settle()
    world.control()
    world.settle()
    world.tick(2)
    assert world.plan().requeue_after == 7


def test_a_pod_that_lost_its_peer_and_one_that_is_to_leave_wake_the_job_in_time() -> None:
    world = until(World(make_job()), "real")
    first, second = world.alive()
    world.finish(first, **LOST_PEER)
    world.settle()
    assert world.plan().requeue_after == ORIGIN_SECONDS
    second["metadata"]["deletionTimestamp"] = clock.to_text(world.now - timedelta(seconds=STUCK_SECONDS - 2))
    assert world.plan().requeue_after == 2


def test_pods_of_an_earlier_execution_are_awaited_by_their_watch_and_garbage_by_looking() -> None:
    world = begun(spec__restart={"backoffSeconds": 0})
    world.objects.pop(("Job", world.active_jobs()[0]))
    world.carry_out(world.plan())
    world.tick(60)
    assert (world.plan().apply, world.plan().requeue_after) == ((), None), "the pod of the deleted Job runs"
    seen = replace(world.observe(), pods=(), foreign=("sim-pseudo-e2",))
    assert planned(world, seen).requeue_after == UNWATCHED_SECONDS


def test_a_suspended_job_shows_the_checkpoint_of_a_pod_that_is_gone() -> None:
    """From the termination message that the watch reported, or from the pod's last report, whichever is newer."""
    world = begun()
    report, words = saved(world, 7), ended_pod(world, 9)
    world.set(suspend=True)
    world.settle()
    seen = replace(world.observe(), pods=())
    assert latest(planned(world, seen)) is None
    assert latest(planned(world, replace(seen, last_reports=(report,)))) == "pseudo-7"
    for deleted in ((words,), ()):
        wanted = planned(world, replace(seen, last_reports=(report,), deleted_pods=deleted))
        assert latest(wanted) == "pseudo-9", "an older report takes nothing back"
        seen = replace(seen, status=wanted.status)


def test_a_result_is_not_lost_with_its_pod() -> None:
    world = begun()
    words = ended_pod(world, 10, "Succeeded", PodPhase.SUCCEEDED)
    world.finish_all()
    seen = replace(world.observe(), pods=(), deleted_pods=(words,))
    wanted = planned(world, seen)
    assert (wanted.status.phases[0].state, wanted.status.phases[0].end_checkpoint) == ("Complete", "pseudo-10")
    assert planned(world, replace(seen, deleted_pods=())).status.execution == 2, "without it the phase runs again"
