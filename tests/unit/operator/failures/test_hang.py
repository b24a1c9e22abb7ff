"""Hung training: which clock runs out, which rank is blamed, and what the operator does."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from pseudoreal_api.names import CONTAINER
from pseudoreal_api.wire.reports import PodReport, RankReport
from pseudoreal_operator import clock
from pseudoreal_operator.failures.hang import find_stall
from pseudoreal_operator.lifecycle.plan import plan
from pseudoreal_operator.observe.stages import Execution, StageKind
from pseudoreal_operator.observe.view import LastReport, Observed, PodPhase, View
from pseudoreal_operator.status.conditions import find

from tests.support.names import bare
from tests.unit.operator.lifecycle.support.steps import until
from tests.unit.operator.support.world import SETTINGS, World, make_job

HANG = {"startSeconds": 300, "stepSeconds": 60, "checkpointSeconds": 100}


def training(**hang: Any) -> World:
    """Return a world in which two pods of the phase real run."""
    world = until(World(make_job(spec__hang=HANG | hang, spec__restart={"backoffSeconds": 0})), "real")
    for index, pod in enumerate(world.alive()):
        pod["spec"] = {"nodeName": f"node-{index}"}
    return world


def sign(rank: int, activity: str = "waiting", **changes: Any) -> RankReport:
    values: dict[str, Any] = {"rank": rank, "activity": activity, "seconds": 50, "step": 7}
    return RankReport.model_validate(values | changes)


def observed(
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
            begun=moment(200) if begun else None,
            progressed=None if stepped is None else moment(stepped),
        )
        for one in signs
    ]
    return replace(world.observe(), last_reports=tuple(seen))


def stall(world: World, seen: Observed) -> tuple[str, str]:
    found = find_stall(View(seen, world.now))
    return (found.reason, found.sentence) if found else ("", "")


def test_a_rank_alone_is_named() -> None:
    world = training()
    seen = observed(world, sign(0, "computing"))
    assert (
        "step 7: rank 0 on pod" in stall(world, replace(seen, pods=tuple(pod for pod in seen.pods if not pod.index)))[1]
    )


def test_where_nobody_is_to_blame_it_is_said_what_all_do() -> None:
    world = training()
    for activity in ("waiting", "computing"):
        assert f"all of them are {activity}." in stall(world, observed(world, sign(0, activity), sign(1, activity)))[1]


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
def test_each_clock_has_its_word(what: dict[str, Any], reason: str) -> None:
    world = training()
    assert stall(world, observed(world, sign(0), sign(1, "computing"), **what))[0] == reason


def test_a_save_has_a_clock_of_its_own() -> None:
    world = training()
    seen = observed(world, sign(0), sign(1, saving_seconds=100), stepped=1)
    assert stall(world, seen)[0] == "CheckpointStalled"
    assert stall(world, observed(world, sign(0), sign(1, saving_seconds=98), stepped=1)) == ("", "")


def test_a_pod_that_fell_silent_in_a_save_has_saved_if_the_others_went_on() -> None:
    world = training(stepSeconds=10_000)
    seen = observed(world, sign(0, "computing"), sign(1, saving_seconds=5), stepped=1)
    silent = replace(seen.last_reports[1], last=world.now - timedelta(seconds=200), progressed=None)
    assert stall(world, replace(seen, last_reports=(seen.last_reports[0], silent))) == ("", "")
    waits = replace(seen.last_reports[0], progressed=world.now - timedelta(seconds=201))
    assert stall(world, replace(seen, last_reports=(waits, silent)))[0] == "CheckpointStalled"


def test_nothing_is_judged_that_was_never_heard() -> None:
    world = training()
    world.tick(100_000)
    assert stall(world, world.observe()) == ("", "")


def test_ranks_that_have_ended_do_not_hang() -> None:
    world = training()
    assert stall(world, observed(world, sign(0, "ended"), sign(1, "ended"), stepped=600)) == ("", "")


def test_clocks_start_anew_with_each_execution() -> None:
    world = training()
    seen = observed(world, sign(0), sign(1, "computing"))
    old = tuple(replace(one, execution=Execution("real", StageKind.TRAIN, 0)) for one in seen.last_reports)
    assert stall(world, replace(seen, last_reports=old)) == ("", "")


@pytest.mark.parametrize(
    ("signs", "says"),
    [
        ((sign(0), sign(1, "computing", doing="backward")), "node node-1, is computing (backward)"),
        ((sign(0, process="T"), sign(1)), "node node-0, is stopped"),
        ((sign(0), sign(1, process="Z")), "node node-1, is dead"),
    ],
)
def test_the_rank_its_pod_and_its_node_are_named(signs: tuple[RankReport, ...], says: str) -> None:
    world = training()
    sentence = stall(world, observed(world, *signs))[1]
    assert says in sentence
    assert "rank" in sentence
    assert "on pod sim-real-e1-" in bare(sentence)
    assert "spec.hang.stepSeconds" in sentence
    assert "at step 7" in sentence


def test_a_pod_that_fell_silent_is_blamed_first() -> None:
    world = training()
    seen = observed(world, sign(0), sign(1))
    silent = replace(seen.last_reports[1], last=seen.last_reports[1].first)
    sentence = stall(world, replace(seen, last_reports=(seen.last_reports[0], silent)))[1]
    assert "node node-1, has not been heard since" in sentence
    assert "node-0" not in sentence


def test_a_pod_that_never_spoke_is_named_once_all_of_them_run() -> None:
    world = training()
    seen = observed(world, sign(0, "starting", step=0), stepped=None, begun=False)
    assert "node node-1, was never heard" in stall(world, seen)[1]
    waiting = tuple(replace(pod, phase=PodPhase.PENDING) if pod.index else pod for pod in seen.pods)
    assert stall(world, replace(seen, pods=waiting)) == ("", "")


@pytest.mark.parametrize(("seconds", "reason"), [(1, ""), (299, ""), (301, "StartStalled")])
def test_a_pod_that_came_late_has_its_time(seconds: int, reason: str) -> None:
    """The first pod has waited for the late one, which has had no time to report."""
    world = training()
    world.tick(301)
    started = {"startedAt": clock.to_text(world.now - timedelta(seconds=seconds))}
    late = next(pod for pod in world.alive() if pod["spec"]["nodeName"] == "node-1")
    late["status"]["containerStatuses"] = [{"name": CONTAINER, "state": {"running": started}}]
    seen = observed(world, sign(0), stepped=None, begun=False)
    seen = replace(seen, last_reports=(replace(seen.last_reports[0], report=PodReport()),))
    assert stall(world, seen)[0] == reason


def test_pods_that_run_and_do_not_meet_have_not_started() -> None:
    """No rank starts before all pods have met, so no rank has been reported."""
    world = training()
    seen = observed(world, sign(0), sign(1), stepped=None, begun=False)
    seen = replace(seen, last_reports=tuple(replace(one, report=PodReport()) for one in seen.last_reports))
    reason, sentence = stall(world, seen)
    assert reason == "StartStalled"
    assert "have not met at rank 0 on pod sim-real-e1" in bare(sentence)
    assert "no rank has begun" in sentence
    silent = replace(seen.last_reports[1], last=seen.last_reports[1].first)
    assert "rank 1 on pod" in stall(world, replace(seen, last_reports=(seen.last_reports[0], silent)))[1]
    waiting = tuple(replace(pod, phase=PodPhase.PENDING) if pod.index else pod for pod in seen.pods)
    assert stall(world, replace(seen, pods=waiting)) == ("", "")


def test_the_clock_of_the_start_begins_with_the_last_pod() -> None:
    world = training()
    seen = observed(world, sign(0, "starting", step=0), sign(1, "starting", step=0), stepped=None, begun=False)
    assert stall(world, seen)[0] == "StartStalled"
    late = replace(seen.last_reports[1], first=seen.last_reports[1].last)
    assert stall(world, replace(seen, last_reports=(seen.last_reports[0], late))) == ("", "")


def acted(action: str) -> World:
    world = training(action=action)
    wanted = plan(observed(world, sign(0), sign(1, "computing")), world.now, SETTINGS)
    world.carry_out(wanted)
    return world


def test_event_says_so_and_leaves_the_pods_alone() -> None:
    world = acted("Report")
    progressing = find(world.status, "Progressing")
    assert progressing
    assert (progressing.status, progressing.reason) == ("False", "StepStalled")
    assert "node-1" in progressing.message
    assert world.active_jobs() == ["sim-real-e1"]
    assert list(world.events.values()).count("HangDetected") == 1


def test_restart_begins_a_new_execution_and_remembers_the_node() -> None:
    world = acted("Restart")
    assert world.status.execution == 2
    (fault,) = world.status.faults
    assert (fault.reason, fault.node) == ("StepStalled", "node-1")
    assert {"HangDetected", "ExecutionFailed"} <= set(world.events.values())
    assert world.active_jobs() == ["sim-real-e1"], "it is deleted by the next pass, when the number is safe"
    world.carry_out(world.plan())
    assert world.active_jobs() == []


def test_fail_ends_the_job() -> None:
    world = acted("Fail")
    failed = find(world.status, "Failed")
    assert failed
    assert (failed.reason, "spec.hang.action is Fail" in failed.message) == ("StepStalled", True)


def test_a_straggler_is_named_and_left_alone() -> None:
    world = training()
    signs = (sign(0, busy_seconds=1.0, activity="computing"), sign(1, busy_seconds=9.0, activity="computing"))
    wanted = plan(observed(world, *signs, stepped=1), world.now, SETTINGS)
    world.carry_out(wanted)
    progressing = find(world.status, "Progressing")
    assert progressing
    assert (progressing.status, progressing.reason) == ("True", "Straggling")
    assert "rank 1" in progressing.message
    assert "node-1" in progressing.message
    assert list(world.events.values()).count("StragglerDetected") == 1


def noticed(world: World, *looks: Observed) -> list[str]:
    """Return the names of the events of passes over these observations, one after the other."""
    names: list[str] = []
    for step, seen in enumerate(looks):
        assert world.status.progress
        progress = world.status.progress.model_copy(update={"step": step})
        world.status = world.status.model_copy(update={"progress": progress})
        wanted = plan(replace(seen, status=world.status), world.now, SETTINGS)
        names += [event.name(world.job.metadata) for event in wanted.events]
        world.carry_out(wanted)
    return names


def test_a_rank_at_the_bound_of_a_straggler_is_told_of_once() -> None:
    world = training()
    busy = [2.95 + 0.1 * (number % 2) for number in range(50)]
    looks = [observed(world, sign(0, busy_seconds=1.0), sign(1, busy_seconds=seconds), stepped=1) for seconds in busy]
    assert len(noticed(world, *looks)) == 1
    clearly = [
        observed(world, sign(0, busy_seconds=1.0), sign(1, busy_seconds=seconds), stepped=1) for seconds in (2.3, 9)
    ]
    again = noticed(world, *clearly)
    assert len(again) == 1
    assert list(world.events.values()).count("StragglerDetected") == 1, "the same rank in the same execution"


def test_another_rank_that_straggles_is_another_event() -> None:
    world = training()
    looks = [
        observed(world, sign(0, busy_seconds=first), sign(1, busy_seconds=second), stepped=1)
        for first, second in ((1.0, 9.0), (1.0, 1.0), (9.0, 1.0))
    ]
    assert len(set(noticed(world, *looks))) == 2


def test_steps_that_all_take_too_long_are_one_event() -> None:
    """With action Report the operator does nothing about slow steps, so each of them is noticed."""
    world = training(action="Report")
    looks = [
        observed(world, sign(0, "computing", step=step), sign(1, step=step), stepped=stepped)
        for step in range(60)
        for stepped in (61, 1)
    ]
    names = noticed(world, *looks)
    assert len(names) == 60
    assert len(set(names)) == 1
