"""Hung training: which clock runs out, which rank is blamed, and what the operator does."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from pseudoreal_api.names import CONTAINER
from pseudoreal_api.wire.reports import PodReport, RankReport
from pseudoreal_operator import clock
from pseudoreal_operator.failures.hang import find_hang
from pseudoreal_operator.lifecycle.plan import plan
from pseudoreal_operator.observe.stages import Execution, StageKind
from pseudoreal_operator.observe.view import LastReport, Observed, PodPhase, Pods, View
from pseudoreal_operator.status.conditions import find

from tests.support.names import bare
from tests.unit.operator.lifecycle.support.steps import run_until
from tests.unit.operator.support.world import SETTINGS, World, make_job

HANG = {"startSeconds": 300, "stepSeconds": 60, "checkpointSeconds": 100}


def training_world(**hang: Any) -> World:
    """Return a world in which two pods of the phase real run."""
    world = run_until(World(make_job(spec__hang=HANG | hang, spec__restart={"backoffSeconds": 0})), "real")
    for index, pod in enumerate(world.alive()):
        pod["spec"] = {"nodeName": f"node-{index}"}
    return world


def rank_report(rank: int, activity: str = "waiting", **changes: Any) -> RankReport:
    values: dict[str, Any] = {"rank": rank, "activity": activity, "seconds": 50, "step": 7}
    return RankReport.model_validate(values | changes)


def observe(
    world: World, *signs: RankReport, ago: float = 1, stepped: float | None = 61, begun: bool = True
) -> Observed:
    """Return the observation after two pods with one rank each reported `ago` seconds ago; their last step was
    `stepped` seconds ago."""

    def moment(seconds: float) -> Any:
        earlier = replace(world)
        earlier.tick(-seconds)
        return earlier.now

    execution = Execution("real", StageKind.TRAIN, 1)
    names = {pod.index: pod.name for pod in world.observe().pods if pod.execution == execution}
    seen = [
        LastReport(
            execution,
            one.rank,
            names[one.rank],
            first=moment(400),
            last=moment(ago),
            report=PodReport(ranks=[one]),
            steps=one.step,
            training_since=moment(200) if begun else None,
            progressed=None if stepped is None else moment(stepped),
        )
        for one in signs
    ]
    return replace(world.observe(), last_reports=tuple(seen))


def hang_of(world: World, seen: Observed) -> tuple[str, str]:
    found = find_hang(View(seen, world.now))
    return (found.reason, found.sentence) if found else ("", "")


def test_hang_names_a_single_suspected_rank() -> None:
    world = training_world()
    seen = observe(world, rank_report(0, "computing"))
    assert (
        "step 7: rank 0 on pod"
        in hang_of(world, replace(seen, pods=Pods(pod for pod in seen.pods if not pod.index)))[1]
    )


def test_pod_whose_report_has_no_room_is_not_suspected() -> None:
    world = training_world()
    seen = observe(world, rank_report(0))
    assert "rank 1 on pod sim-real-e1-1-4, node node-1, has never reported" in bare(hang_of(world, seen)[1])
    sentence = hang_of(world, replace(seen, refuses_reports=True))[1]
    assert "rank 1" not in sentence
    assert "rank 0 on pod" in sentence


def test_hang_without_a_suspect_says_what_all_ranks_do() -> None:
    world = training_world()
    for activity in ("waiting", "computing"):
        assert (
            f"all ranks are {activity}."
            in hang_of(world, observe(world, rank_report(0, activity), rank_report(1, activity)))[1]
        )


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"stepped": 59}, ""),
        ({"stepped": 61}, "StepStalled"),
        # Since the first rank was seen at work.
        ({"stepped": None}, "StepStalled"),
        ({"stepped": None, "begun": False}, "StartStalled"),
    ],
)
def test_each_clock_has_its_reason(what: dict[str, Any], reason: str) -> None:
    world = training_world()
    assert hang_of(world, observe(world, rank_report(0), rank_report(1, "computing"), **what))[0] == reason


def test_a_save_has_a_clock_of_its_own() -> None:
    world = training_world()
    seen = observe(world, rank_report(0), rank_report(1, saving_seconds=100), stepped=1)
    assert hang_of(world, seen)[0] == "CheckpointStalled"
    assert hang_of(world, observe(world, rank_report(0), rank_report(1, saving_seconds=98), stepped=1)) == ("", "")


def test_a_pod_that_fell_silent_in_a_save_has_saved_if_the_others_went_on() -> None:
    world = training_world(stepSeconds=10_000)
    seen = observe(world, rank_report(0, "computing"), rank_report(1, saving_seconds=5), stepped=1)
    silent = replace(seen.last_reports[1], last=world.now - timedelta(seconds=200), progressed=None)
    assert hang_of(world, replace(seen, last_reports=(seen.last_reports[0], silent))) == ("", "")
    waits = replace(seen.last_reports[0], progressed=world.now - timedelta(seconds=201))
    assert hang_of(world, replace(seen, last_reports=(waits, silent)))[0] == "CheckpointStalled"


def test_execution_that_never_reported_does_not_hang() -> None:
    world = training_world()
    world.tick(100_000)
    assert hang_of(world, world.observe()) == ("", "")


def test_ranks_that_have_ended_do_not_hang() -> None:
    world = training_world()
    assert hang_of(world, observe(world, rank_report(0, "ended"), rank_report(1, "ended"), stepped=600)) == ("", "")


def test_hang_clocks_start_with_each_execution() -> None:
    world = training_world()
    seen = observe(world, rank_report(0), rank_report(1, "computing"))
    old = tuple(replace(one, execution=Execution("real", StageKind.TRAIN, 0)) for one in seen.last_reports)
    assert hang_of(world, replace(seen, last_reports=old)) == ("", "")


@pytest.mark.parametrize(
    ("signs", "says"),
    [
        ((rank_report(0), rank_report(1, "computing", doing="backward")), "node node-1, is computing (backward)"),
        ((rank_report(0, process="T"), rank_report(1)), "node node-0, is stopped"),
        ((rank_report(0), rank_report(1, process="Z")), "node node-1, is dead"),
    ],
)
def test_the_rank_its_pod_and_its_node_are_named(signs: tuple[RankReport, ...], says: str) -> None:
    world = training_world()
    sentence = hang_of(world, observe(world, *signs))[1]
    assert says in sentence
    assert "rank" in sentence
    assert "on pod sim-real-e1-" in bare(sentence)
    assert "spec.hang.stepSeconds" in sentence
    assert "at step 7" in sentence


def test_a_pod_that_fell_silent_is_blamed_first() -> None:
    world = training_world()
    seen = observe(world, rank_report(0), rank_report(1))
    silent = replace(seen.last_reports[1], last=seen.last_reports[1].first)
    sentence = hang_of(world, replace(seen, last_reports=(seen.last_reports[0], silent)))[1]
    assert "node node-1, has not reported since" in sentence
    assert "node-0" not in sentence


def test_running_pod_that_never_reported_is_suspected() -> None:
    world = training_world()
    seen = observe(world, rank_report(0, "starting", step=0), stepped=None, begun=False)
    assert "node node-1, has never reported" in hang_of(world, seen)[1]
    waiting = Pods(replace(pod, phase=PodPhase.PENDING) if pod.index else pod for pod in seen.pods)
    assert hang_of(world, replace(seen, pods=waiting)) == ("", "")


@pytest.mark.parametrize(("seconds", "reason"), [(1, ""), (299, ""), (301, "StartStalled")])
def test_start_clock_waits_for_a_late_pod(seconds: int, reason: str) -> None:
    """The first pod has waited for the late one, which has had no time to report."""
    world = training_world()
    world.tick(301)
    started = {"startedAt": clock.to_text(world.now - timedelta(seconds=seconds))}
    late = next(pod for pod in world.alive() if pod["spec"]["nodeName"] == "node-1")
    late["status"]["containerStatuses"] = [{"name": CONTAINER, "state": {"running": started}}]
    seen = observe(world, rank_report(0), stepped=None, begun=False)
    seen = replace(seen, last_reports=(replace(seen.last_reports[0], report=PodReport()),))
    assert hang_of(world, seen)[0] == reason


def test_pods_without_a_rendezvous_stall_at_the_start() -> None:
    """No rank starts before all pods have met, so no rank has been reported."""
    world = training_world()
    seen = observe(world, rank_report(0), rank_report(1), stepped=None, begun=False)
    seen = replace(seen, last_reports=tuple(replace(one, report=PodReport()) for one in seen.last_reports))
    reason, sentence = hang_of(world, seen)
    assert reason == "StartStalled"
    assert "have not all connected to rank 0 on pod sim-real-e1" in bare(sentence)
    assert "no rank has started" in sentence
    silent = replace(seen.last_reports[1], last=seen.last_reports[1].first)
    assert "rank 1 on pod" in hang_of(world, replace(seen, last_reports=(seen.last_reports[0], silent)))[1]
    waiting = Pods(replace(pod, phase=PodPhase.PENDING) if pod.index else pod for pod in seen.pods)
    assert hang_of(world, replace(seen, pods=waiting)) == ("", "")


def test_start_clock_starts_with_the_last_pod() -> None:
    world = training_world()
    seen = observe(
        world, rank_report(0, "starting", step=0), rank_report(1, "starting", step=0), stepped=None, begun=False
    )
    assert hang_of(world, seen)[0] == "StartStalled"
    late = replace(seen.last_reports[1], first=seen.last_reports[1].last)
    assert hang_of(world, replace(seen, last_reports=(seen.last_reports[0], late))) == ("", "")


def act_on_hang(action: str) -> World:
    world = training_world(action=action)
    wanted = plan(observe(world, rank_report(0), rank_report(1, "computing")), world.now, SETTINGS)
    world.carry_out(wanted)
    return world


def test_action_report_leaves_the_pods_alone() -> None:
    world = act_on_hang("Report")
    progressing = find(world.status, "Progressing")
    assert progressing
    assert (progressing.status, progressing.reason) == ("False", "StepStalled")
    assert "node-1" in progressing.message
    assert world.active_jobs() == ["sim-real-e1"]
    assert list(world.events.values()).count("HangDetected") == 1


def test_action_restart_starts_a_new_execution_and_records_the_node() -> None:
    world = act_on_hang("Restart")
    assert world.status.execution == 2
    (fault,) = world.status.faults
    assert (fault.reason, fault.node) == ("StepStalled", "node-1")
    assert {"HangDetected", "ExecutionFailed"} <= set(world.events.values())
    assert world.active_jobs() == ["sim-real-e1"], "it is deleted by the next pass, when the number is safe"
    world.carry_out(world.plan())
    assert world.active_jobs() == []


def test_action_fail_fails_the_job() -> None:
    world = act_on_hang("Fail")
    failed = find(world.status, "Failed")
    assert failed
    assert (failed.reason, "spec.hang.action is Fail" in failed.message) == ("StepStalled", True)


def test_straggler_is_reported_and_not_restarted() -> None:
    world = training_world()
    signs = (
        rank_report(0, busy_seconds=1.0, activity="computing"),
        rank_report(1, busy_seconds=9.0, activity="computing"),
    )
    wanted = plan(observe(world, *signs, stepped=1), world.now, SETTINGS)
    world.carry_out(wanted)
    progressing = find(world.status, "Progressing")
    assert progressing
    assert (progressing.status, progressing.reason) == ("True", "Straggling")
    assert "rank 1" in progressing.message
    assert "node-1" in progressing.message
    assert list(world.events.values()).count("StragglerDetected") == 1


def event_reasons(world: World, *observations: Observed) -> list[str]:
    """Return the names of the events of passes over these observations, one after the other."""
    names: list[str] = []
    for step, seen in enumerate(observations):
        assert world.status.progress
        progress = world.status.progress.model_copy(update={"step": step})
        world.status = world.status.model_copy(update={"progress": progress})
        wanted = plan(replace(seen, status=world.status), world.now, SETTINGS)
        names += [event.name(world.job.metadata) for event in wanted.events]
        world.carry_out(wanted)
    return names


def test_rank_near_the_straggler_bound_causes_one_event() -> None:
    world = training_world()
    busy = [2.95 + 0.1 * (number % 2) for number in range(50)]
    observations = [
        observe(world, rank_report(0, busy_seconds=1.0), rank_report(1, busy_seconds=seconds), stepped=1)
        for seconds in busy
    ]
    assert len(event_reasons(world, *observations)) == 1
    clearly = [
        observe(world, rank_report(0, busy_seconds=1.0), rank_report(1, busy_seconds=seconds), stepped=1)
        for seconds in (2.3, 9)
    ]
    again = event_reasons(world, *clearly)
    assert len(again) == 1
    assert list(world.events.values()).count("StragglerDetected") == 1, "the same rank in the same execution"


def test_each_straggling_rank_has_its_event() -> None:
    world = training_world()
    observations = [
        observe(world, rank_report(0, busy_seconds=first), rank_report(1, busy_seconds=second), stepped=1)
        for first, second in ((1.0, 9.0), (1.0, 1.0), (9.0, 1.0))
    ]
    assert len(set(event_reasons(world, *observations))) == 2


def test_repeated_step_stalls_are_one_event_per_execution() -> None:
    """With action Report the operator does nothing about slow steps, so each of them is noticed."""
    world = training_world(action="Report")
    observations = [
        observe(world, rank_report(0, "computing", step=step), rank_report(1, step=step), stepped=stepped)
        for step in range(60)
        for stepped in (61, 1)
    ]
    names = event_reasons(world, *observations)
    assert len(names) == 60
    assert len(set(names)) == 1
