"""The initial list after a start: idle jobs need no pass, all others get one."""

import copy
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest
from pseudoreal_api.wire.reports import PodReport, RankReport
from pseudoreal_operator.cluster.api import Api, Name
from pseudoreal_operator.loop.counts import Counts
from pseudoreal_operator.loop.event_recorder import EventRecorder
from pseudoreal_operator.loop.initial_list import IdleJob, find_idle_jobs
from pseudoreal_operator.loop.reconcile import Dependencies
from pseudoreal_operator.observe.report_store import ReportingPod, ReportStore
from pseudoreal_operator.observe.stages import Execution, StageKind

from tests.unit.operator.lifecycle.support.steps import until
from tests.unit.operator.support.world import SETTINGS, UID, World, make_job

Json = dict[str, Any]
NAME = Name("default", "sim")


class Lists:
    """A fake API server that answers lists, and no other requests."""

    def __init__(self, world: World) -> None:
        self.asked: list[str] = []
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
        self.asked.append(f"{kind} {namespace} {selector}".strip())
        for body in self.bodies[kind]:
            yield body


def training() -> World:
    world = until(World(make_job(spec__deadlines={"activeSeconds": 10**8})), "pseudo")
    world.settle()
    return world


async def idle_job_of(world: World, change: Callable[[Lists], object] = str) -> IdleJob | None:
    lists = Lists(world)
    change(lists)
    found = await find_idle_jobs(deps(lists), lambda _name, _after: None)
    assert lists.asked == ["Job None pseudoreal.dev/job-name", "Pod None pseudoreal.dev/job-name", "PseudoRealJob None"]
    return found.get(NAME)


def deps(lists: Lists) -> Dependencies:
    api, counts = cast(Api, lists), Counts()
    return Dependencies(api, SETTINGS, ReportStore(), counts, EventRecorder(api, counts))


async def test_a_job_that_trains_rests_until_its_next_clock_runs_out() -> None:
    idle = await idle_job_of(training())
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


def _hold(lists: Lists) -> None:
    lists.bodies["PseudoRealJob"][0]["metadata"]["finalizers"] = ["pseudoreal.dev/cleanup"]


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


@pytest.mark.parametrize("change", [_garble, _break, _vanish, _end, _delete, _hold, _spoil, _steal, _forget])
async def test_a_job_at_which_something_is_to_be_done_does_not_rest(change: Callable[[Lists], object]) -> None:
    assert await idle_job_of(training(), change) is None


async def test_a_job_that_another_controller_manages_rests_whatever_is_to_be_done() -> None:
    def manage(lists: Lists) -> None:
        lists.bodies["PseudoRealJob"][0]["spec"]["managedBy"] = "kueue.x-k8s.io/multikueue"
        _end(lists)

    assert await idle_job_of(training(), manage) == IdleJob("7", None)


async def test_its_pods_are_heard_from_then_on() -> None:
    lists, woken = Lists(training()), list[tuple[Name, float]]()
    found = deps(lists)
    await find_idle_jobs(found, lambda name, after: woken.append((name, after)))
    report = PodReport(ranks=[RankReport(rank=0, activity="starting", seconds=0, step=0)])
    reporter = ReportingPod(("default", UID), Execution("pseudo", StageKind.TRAIN, 1), 0, "pod")
    now = training().now
    assert found.report_store.store(reporter, report, now)
    assert woken == [(NAME, 1.0)]


async def test_a_job_with_a_claim_of_its_own_rests_too() -> None:
    world = until(World(make_job(spec__checkpoint={})), "pseudo")
    world.settle()
    assert await idle_job_of(world) is not None
