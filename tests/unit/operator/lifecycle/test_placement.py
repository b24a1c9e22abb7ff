"""The map from ranks to nodes in the status: when it is known, where its data comes from, and how large it is."""

from dataclasses import replace
from typing import Any

import pytest
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_api.status.status import Placement
from pseudoreal_api.wire.reports import PodReport, RankReport
from pseudoreal_operator.lifecycle.plan import placement
from pseudoreal_operator.observe.reading import read_pod
from pseudoreal_operator.observe.report_store import ReportingPod, merge_report
from pseudoreal_operator.observe.view import Pods, View

from tests.unit.operator.lifecycle.support.steps import run_until
from tests.unit.operator.support.world import UID, World, make_job

TOPOLOGY = {"spec__scheduling": {"topology": {"preferred": "rack"}}}


def wide_job(workers: int, **changes: Any) -> PseudoRealJob:
    shape = {"spec__phases__1__workers": workers, "spec__phases__1__processesPerWorker": 2}
    return make_job(**shape, spec__phases__1__batch={"sequences": 60_000}, **changes)


def training_world(**changes: Any) -> World:
    """Return a world in which three pods of the phase real run, with two ranks each, and without nodes."""
    return run_until(World(wide_job(3, **changes)), "real")


def schedule_on(world: World, *nodes: str) -> World:
    for pod, node in zip(world.alive(), nodes, strict=True):
        pod["spec"] = {"nodeName": node}
    return world


def report_first_ranks(world: World, *firsts: int) -> None:
    """Let each pod report its two ranks."""
    for body, first in zip(world.alive(), firsts, strict=True):
        pod = read_pod(body)
        ranks = [RankReport(rank=first + one, activity="computing", seconds=0, step=1) for one in (0, 1)]
        reporter = ReportingPod(("default", UID), pod.execution, pod.index, pod.name)
        world.reports[pod.name] = merge_report(None, reporter, PodReport(ranks=ranks), world.now)


def planned_placement(world: World) -> Placement | None:
    world.settle()
    return world.status.placement


def rows(found: Placement | None) -> list[tuple[str, str, str]]:
    return [(node.node, node.ranks, node.workers) for node in found.nodes] if found else []


def test_placement_numbers_ranks_by_pod_without_a_topology() -> None:
    world = schedule_on(training_world(), "b", "a", "b")
    assert rows(planned_placement(world)) == [("b", "0-1,4-5", "0,2"), ("a", "2-3", "1")]
    assert world.status.placement is not None
    assert (world.status.placement.phase_name, world.status.placement.execution) == ("real", 1)


def test_placement_is_unknown_until_all_pods_have_a_node() -> None:
    assert planned_placement(schedule_on(training_world(), "b", "", "b")) is None


def test_placement_uses_reported_ranks_with_a_topology() -> None:
    world = schedule_on(training_world(**TOPOLOGY), "b", "a", "b")
    assert planned_placement(world) is None, "only they know"
    report_first_ranks(world, 0, 4, 2)
    assert rows(planned_placement(world)) == [("b", "0-3", "0,2"), ("a", "4-5", "1")]


def test_restarted_operator_reads_ranks_from_the_status() -> None:
    world = schedule_on(training_world(**TOPOLOGY), "b", "a", "b")
    report_first_ranks(world, 0, 4, 2)
    before = planned_placement(world)
    world.reports.clear()
    assert planned_placement(world) == before
    view = View(world.observe(), world.now)
    pods = [view.pod_of_rank(rank) for rank in range(6)]
    assert [pod.index if pod else None for pod in pods] == [0, 0, 2, 2, 1, 1]
    assert [view.first_rank(pod) for pod in view.pods] == [0, 4, 2]


def test_reported_ranks_override_those_in_the_status() -> None:
    world = schedule_on(training_world(**TOPOLOGY), "b", "a", "b")
    report_first_ranks(world, 0, 4, 2)
    planned_placement(world)
    report_first_ranks(world, 0, 2, 4)
    view = View(world.observe(), world.now)
    assert [view.first_rank(pod) for pod in view.pods] == [0, 2, 4]
    assert rows(planned_placement(world)) == [("b", "0-1,4-5", "0,2"), ("a", "2-3", "1")]


def test_placement_stays_until_the_next_execution_has_its_nodes() -> None:
    world = schedule_on(training_world(), "b", "a", "b")
    before = planned_placement(world)
    world.disrupt(world.alive()[0])
    world.control()
    assert planned_placement(world) == before


@pytest.mark.parametrize(("nodes", "kept", "omitted"), [(5000, 100, 4900), (2, 0, 2)])
def test_placement_of_thousands_of_pods_is_bounded(nodes: int, kept: int, omitted: int) -> None:
    """Nodes whose ranges do not fit are left out as well."""
    world = training_world()
    seen = world.observe()
    pods = Pods(
        replace(seen.pods[-1], name=f"pod-{index}", index=index, node=f"gpu-node-{index % nodes:05d}")
        for index in range(5000)
    )
    jobs = tuple(replace(job, workers=5000) for job in seen.jobs)
    found = placement(View(replace(seen, job=wide_job(5000), jobs=jobs, pods=pods), world.now))
    assert found is not None
    assert (len(found.nodes), found.omitted_nodes) == (kept, omitted)
    assert len(found.to_json()) < 8_000
