"""Requests, writes and memory of the operator during the life of jobs: a small part of `make bench-operator`, to detect
growth."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from pseudoreal_dev.cluster.control_plane import ControlPlane

from tests.support.cluster import Cluster
from tests.support.load import simulator
from tests.support.load.audit import AuditLog, Request, job_name
from tests.support.load.connection import MERGE, Connection, connect
from tests.support.load.jobs import RESOURCE, one_phase, two_phases
from tests.support.load.simulator import OURS, Simulator
from tests.support.load.usage import usage
from tests.support.operator_process import Operator
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.integration

Json = dict[str, Any]

JOBS, PODS = 10, 2
NAMES = {one_phase: [job_name(number) for number in range(JOBS)], two_phases: [job_name(JOBS + n) for n in range(JOBS)]}
MOST_WRITES = {one_phase: 12, two_phases: 20}
MOST_REQUESTS = {one_phase: 27, two_phases: 63}
"""Maximal median of requests per job."""
MOST_BYTES = 250e6


@dataclass(frozen=True)
class Course:
    """Jobs training until their release; in the meantime their pods are changed."""

    connection: Connection
    namespace: str
    pods: Simulator
    log: AuditLog
    operator: Operator

    async def run(self) -> None:
        for body, names in NAMES.items():
            for name in names:
                await self.connection.request("POST", self._jobs(), body(name, PODS))
        await _until("training", self._all_train)
        # The first passes may be about what came before, and a slow one about the silence of these pods. A pass that
        # asks or writes for a touch does so at each.
        await _until("a pass over each job without request or write", self._touch_is_free)
        for name in _all_names():
            self.pods.release(name)
        await _until("the ends", self._all_ended)

    async def _touch_is_free(self) -> bool:
        """Change each pod in a field read by a reconcile pass but shown in no status, and wait for a pass over each
        job. Return whether the operator requested nothing for it: the watches have told all that a pass needs."""
        begun, requests = self._passes(), asked(self.log.requests())
        conditions = [{"type": kind, "status": "True"} for kind in ("Ready", f"example.com/pass-{begun:.0f}")]
        async for pod in self.connection.each(self._path("api/v1", "pods")):
            path = self._path("api/v1", f"pods/{pod['metadata']['name']}/status")
            await self.connection.request("PATCH", path, {"status": {"conditions": conditions}}, MERGE)
        await _until("a pass over each job", lambda: self._passed(begun))
        return asked(self.log.requests()) == requests

    async def _passed(self, begun: float) -> bool:
        return self._passes() >= begun + len(_all_names())

    def _passes(self) -> float:
        """Return the number of passes that the operator has made; they need not ask anything."""
        return self.operator.metrics()["pseudoreal_reconcile_duration_seconds_count", frozenset()]

    async def _all_train(self) -> bool:
        jobs = [job async for job in self.connection.each(self._path("apis/batch/v1", "jobs"))]
        return len(jobs) == len(_all_names()) and all(job.get("status", {}).get("ready") == PODS for job in jobs)

    async def _all_ended(self) -> bool:
        self.pods.check()
        jobs = [job async for job in self.connection.each(self._jobs())]
        return all(job.get("status", {}).get("state") == "Complete" for job in jobs)

    def _jobs(self) -> str:
        version, _, plural = RESOURCE.rpartition("/")
        return self._path(f"apis/{version}", plural)

    def _path(self, version: str, rest: str) -> str:
        return f"/{version}/namespaces/{self.namespace}/{rest}"


def writes(requests: list[Request]) -> Counter[str]:
    """Count the operator's writes per job."""
    return Counter(request.job for request in requests if request.is_of_operator and request.is_write)


def asked(requests: list[Request]) -> Counter[str]:
    """Count the operator's requests per job, writes too. Simulated pods do not report: after 20 s the operator reads
    their logs, one a second."""
    return Counter(request.job for request in requests if request.is_for_jobs and request.resource != "pods/log")


def _all_names() -> list[str]:
    return [name for names in NAMES.values() for name in names]


async def _until(what: str, holds: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not await holds():
        assert time.monotonic() < deadline, f"{what} did not come"
        await asyncio.sleep(0.2)


async def live(control_plane: ControlPlane, namespace: str, log: AuditLog, operator: Operator) -> None:
    async with connect(control_plane.server) as connection:
        pods = Simulator(connection, namespace, OURS)
        async with pods.running():
            await Course(connection, namespace, pods, log, operator).run()


def test_a_job_costs_few_writes_and_none_while_nothing_changes(
    control_plane: ControlPlane,
    cluster: Cluster,
    shared_operator: Operator,
    audit_log: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(simulator, "RUN_SECONDS", 0.0)
    log = AuditLog(audit_log)
    asyncio.run(live(control_plane, cluster.namespace, log, shared_operator))
    counted, requests = writes(log.requests()), asked(log.requests())
    for body, names in NAMES.items():
        most = {name: counted[name] for name in names if counted[name] > MOST_WRITES[body]}
        assert not most, [f"{r.job} {r.kind}" for r in log.requests() if r.job in most and r.is_write]
        assert all(counted[name] for name in names), "the log has them all"
        usual = median(requests[name] for name in names)
        assert usual <= MOST_REQUESTS[body], [r.kind for r in log.requests() if r.job == names[0] and r.is_for_jobs]
    assert shared_operator.process is not None
    assert usage(shared_operator.process.pid).peak_bytes < MOST_BYTES
