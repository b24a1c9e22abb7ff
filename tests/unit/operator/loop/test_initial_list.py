"""The initial list after a start: idle jobs need no pass, all others get one."""

import copy
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from pseudoreal_api.wire.reports import PodReport, RankReport
from pseudoreal_operator.cluster.api import Api, Name
from pseudoreal_operator.loop.event_recorder import EventRecorder
from pseudoreal_operator.loop.initial_list import IdleJob, find_idle_jobs
from pseudoreal_operator.loop.reconcile import Dependencies
from pseudoreal_operator.metrics.registry import OperatorCounters
from pseudoreal_operator.observe.report_store import ReportingPod, ReportStore
from pseudoreal_operator.observe.stages import Execution, StageKind

from tests.unit.operator.lifecycle.support.steps import run_until
from tests.unit.operator.support.world import SETTINGS, UID, World, make_job

Json = dict[str, Any]
NAME = Name("default", "sim")


class Lists:
    """A fake API server that answers lists, and no other requests."""

    def __init__(self, world: World) -> None:
        self.requests: list[str] = []
        metadata = {"name": "sim", "namespace": "default", "uid": UID, "resourceVersion": "7", "generation": 1}
        spec = world.job.spec.to_dict()
        self.bodies: dict[str, list[Json]] = {
            "PseudoRealJob": [{"metadata": metadata, "spec": spec, "status": world.status.to_dict()}],
            "Job": world.jobs_list(),
            "Pod": [copy.deepcopy(pod) for pod in world.pods.values()],
        }
        for body in (*self.bodies["Job"], *self.bodies["Pod"]):
            body["metadata"]["namespace"] = "default"

    async def each(self, kind: str, namespace: str | None, selector: str = "", **_: Any) -> AsyncIterator[Json]:
        self.requests.append(f"{kind} {namespace} {selector}".strip())
        for body in self.bodies[kind]:
            yield body


def make_training_world() -> World:
    world = run_until(World(make_job(spec__deadlines={"activeSeconds": 10**8})), "pseudo")
    world.settle()
    return world


async def find_idle_job(world: World, change: Callable[[Lists], object] = str) -> IdleJob | None:
    lists = Lists(world)
    change(lists)
    found = await find_idle_jobs(make_deps(lists), lambda _name, _after: None)
    assert lists.requests == [
        "Job None pseudoreal.dev/job-name",
        "Pod None pseudoreal.dev/job-name",
        "PseudoRealJob None",
    ]
    return found.get(NAME)


def make_deps(lists: Lists) -> Dependencies:
    api, counters = cast(Api, lists), OperatorCounters()
    return Dependencies(api, SETTINGS, ReportStore(), counters, EventRecorder(api, counters))


async def test_training_job_is_idle_until_its_next_deadline() -> None:
    idle = await find_idle_job(make_training_world())
    assert idle is not None
    assert idle.version == "7"
    assert idle.wait is not None, "its deadline"


def _vanish(lists: Lists) -> None:
    lists.bodies["Pod"].clear()
    lists.bodies["Job"].clear()


def _end(lists: Lists) -> None:
    condition = {"type": "Complete", "status": "True", "lastTransitionTime": "2030-01-01T00:00:00Z"}
    lists.bodies["Job"][0]["status"] = {"conditions": [condition]}


def _delete(lists: Lists) -> None:
    lists.bodies["PseudoRealJob"][0]["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"


def _spoil(lists: Lists) -> None:
    lists.bodies["PseudoRealJob"][0]["spec"]["model"]["layers"] = "many"


def _steal(lists: Lists) -> None:
    lists.bodies["Pod"][0]["metadata"]["ownerReferences"] = []


def _forget(lists: Lists) -> None:
    lists.bodies["PseudoRealJob"][0]["status"] = {}


def _garble(lists: Lists) -> None:
    lists.bodies["Pod"][0]["status"] = {"phase": "Purple"}


def _break(lists: Lists) -> None:
    """Make the plan itself raise an error."""
    lists.bodies["PseudoRealJob"][0]["status"]["executionTime"] = "noon"
    lists.bodies["PseudoRealJob"][0]["status"]["startTime"] = "noon"
    lists.bodies["PseudoRealJob"][0]["status"]["activeSince"] = "noon"


@pytest.mark.parametrize("change", [_garble, _break, _vanish, _end, _delete, _spoil, _steal, _forget])
async def test_job_with_work_to_do_is_not_idle(change: Callable[[Lists], object]) -> None:
    assert await find_idle_job(make_training_world(), change) is None


async def test_job_managed_by_another_controller_is_idle() -> None:
    def manage(lists: Lists) -> None:
        lists.bodies["PseudoRealJob"][0]["spec"]["managedBy"] = "kueue.x-k8s.io/multikueue"
        _end(lists)

    assert await find_idle_job(make_training_world(), manage) == IdleJob("7", None)


async def test_reports_of_an_idle_jobs_pods_are_followed() -> None:
    lists, woken = Lists(make_training_world()), list[tuple[Name, float]]()
    found = make_deps(lists)
    await find_idle_jobs(found, lambda name, after: woken.append((name, after)))
    report = PodReport(ranks=[RankReport(rank=0, activity="starting", seconds=0, step=0)])
    reporter = ReportingPod(("default", UID), Execution("pseudo", StageKind.TRAIN, 1), 0, "pod")
    now = make_training_world().now
    assert found.report_store.store(reporter, report, now)
    assert woken == [(NAME, 1.0)]
    assert not found.report_store.store(replace(reporter, index=1000), report, now), "the phase has fewer pods"


async def test_job_with_a_claim_of_its_own_can_be_idle() -> None:
    world = run_until(World(make_job(spec__checkpoint={})), "pseudo")
    world.settle()
    assert await find_idle_job(world) is not None
