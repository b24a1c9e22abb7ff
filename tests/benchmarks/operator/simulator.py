"""Pods without nodes: they run as soon as they are there, and end with the termination message of a good phase.

kwok would do the first half. The second is this project's own contract, by which the operator knows the result of a
phase; so the pods are simulated here as a whole.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import aiohttp
from pseudoreal_api.names import CONTAINER, LABEL_EXECUTION, LABEL_JOB, LABEL_PHASE, LABEL_STAGE
from pseudoreal_api.wire.messages import TerminationMessage
from pseudoreal_operator import clock

from tests.benchmarks.operator.audit import SIMULATOR_END
from tests.benchmarks.operator.connection import MERGE, Connection
from tests.support.cluster import CHECKPOINTS, RESULTS

Json = dict[str, Any]

RUN_SECONDS = 5.0
"""For which a pod runs at least. What the operator says of its start is then not taken for an answer to its end."""
_AT_ONCE = 16
_GONE = 404


class Simulator:
    """Pods of jobs that were not released run without an end."""

    def __init__(self, connection: Connection, namespace: str) -> None:
        self._connection = connection
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._released: set[str] = set()
        self._held: defaultdict[str, list[Json]] = defaultdict(list)
        """By job: pods that run."""
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self.started = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._begin(self._watch())
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    def check(self) -> None:
        """Raises what went wrong in the background."""
        for task in self._tasks:
            if task.done():
                task.result()

    def release(self, job: str) -> None:
        """Its pods end, those of later phases after they ran for a while."""
        self._released.add(job)
        for pod in self._held.pop(job, []):
            self._begin(self._end(pod))

    async def _watch(self) -> None:
        """Watches again whenever the API server ends it, as it does to those that fall behind: the next watch begins
        with all pods that are there."""
        known: set[str] = set()
        while True:
            async for change, pod in self._connection.watch(self._pods, LABEL_JOB):
                if change == "ADDED" and pod["metadata"]["uid"] not in known:
                    known.add(pod["metadata"]["uid"])
                    self._begin(self._start(pod))

    def _begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda done: None if done.cancelled() or done.exception() else self._tasks.discard(done))

    async def _start(self, pod: Json) -> None:
        await self._patch(pod, running(), "pod-start")
        self.started += 1
        await asyncio.sleep(RUN_SECONDS)
        job = pod["metadata"]["labels"][LABEL_JOB]
        if job in self._released:
            await self._end(pod)
        else:
            self._held[job].append(pod)

    async def _end(self, pod: Json) -> None:
        await self._patch(pod, ended(pod["metadata"]["labels"], datetime.now(UTC)), SIMULATOR_END)

    async def _patch(self, pod: Json, status: Json, manager: str) -> None:
        path = f"{self._pods}/{pod['metadata']['name']}/status"
        async with self._places:
            try:
                await self._connection.request("PATCH", path, {"status": status}, MERGE, fieldManager=manager)
            except aiohttp.ClientResponseError as error:
                # Somebody deleted it.
                if error.status != _GONE:
                    raise


def running() -> Json:
    return _status("Running", {"running": {"startedAt": clock.to_text(datetime.now(UTC))}}, ready=True)


def ended(labels: Json, now: datetime) -> Json:
    """With the result of the stage that its labels name."""
    stage = "delink" if labels[LABEL_STAGE] == "delink" else labels[LABEL_PHASE]
    message = TerminationMessage(
        outcome="Succeeded",
        phase=labels[LABEL_PHASE],
        execution=int(labels[LABEL_EXECUTION]),
        checkpoint=CHECKPOINTS[stage],
        digest="0" * 64,
        **RESULTS[stage],
    )
    terminated = {"exitCode": 0, "reason": "Completed", "message": message.to_json(), "finishedAt": clock.to_text(now)}
    return _status("Succeeded", {"terminated": terminated}, ready=False)


def _status(phase: str, state: Json, *, ready: bool) -> Json:
    container = {"name": CONTAINER, "image": "trainer", "imageID": "", "restartCount": 0, "ready": ready}
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {"phase": phase, "conditions": conditions, "containerStatuses": [container | {"state": state}]}
