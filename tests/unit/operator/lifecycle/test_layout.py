"""The layout that a phase was given: how it gets into the status, and that it stays there."""

from typing import Any

import pytest
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_api.wire.layout import ChosenLayout
from pseudoreal_api.wire.reports import PodReport, RankReport
from pseudoreal_operator.observe.reading import read_pod
from pseudoreal_operator.observe.report_store import ReportingPod, merge_report

from tests.unit.operator.lifecycle.support.steps import run_until
from tests.unit.operator.observe.support.reports import LAYOUT
from tests.unit.operator.support.world import UID, World, make_job


@pytest.fixture
def world() -> World:
    """A world in which a phase with an automatic layout trains."""
    batch: dict[str, Any] = {"sequences": 8}
    job: PseudoRealJob = make_job(
        spec__phases__1__parallelism={"layout": "Auto"}, spec__phases__1__workers=2, spec__phases__1__batch=batch
    )
    return run_until(World(job), "real")


def report_layout(world: World, layout: ChosenLayout | None) -> None:
    """Let the pod of rank 0 report a layout."""
    body = world.alive()[0]
    pod = read_pod(body)
    ranks = [RankReport(rank=0, activity="computing", seconds=0, step=1)]
    reporter = ReportingPod(("default", UID), pod.execution, pod.index, pod.name)
    world.reports[pod.name] = merge_report(None, reporter, PodReport(ranks=ranks, layout=layout), world.now)
    world.settle()


def layouts(world: World) -> list[ChosenLayout | None]:
    return [phase.layout for phase in world.status.phases]


def test_layout_is_recorded_for_the_phase_that_reports_it(world: World) -> None:
    report_layout(world, None)
    assert layouts(world) == [None, None]
    report_layout(world, LAYOUT)
    assert layouts(world) == [None, LAYOUT]


def test_newest_reported_layout_replaces_the_old_one(world: World) -> None:
    """An elastic phase has one layout for each number of its ranks."""
    report_layout(world, LAYOUT)
    newer = LAYOUT.model_copy(update={"pipeline": 1})
    report_layout(world, newer)
    assert layouts(world) == [None, newer]
    report_layout(world, None)
    assert layouts(world) == [None, newer]


def test_layout_stays_after_a_fault_and_after_the_end_of_the_job(world: World) -> None:
    report_layout(world, LAYOUT)
    world.finish(world.alive()[0], outcome="Failed")
    world.run_fairly()
    assert world.status.state == "Complete"
    assert layouts(world) == [None, LAYOUT]
