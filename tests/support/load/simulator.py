"""Simulated pods without nodes: they run as soon as they exist, and end with the termination message of a good phase.

kwok could run pods. The termination messages, from which the operator learns a phase's result, are this project's own
contract, so pods are simulated as a whole here.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import aiohttp
from pseudoreal_api.names import CONTAINER, LABEL_EXECUTION, LABEL_JOB, LABEL_PHASE, LABEL_STAGE
from pseudoreal_api.wire.messages import TerminationMessage
from pseudoreal_operator import clock

from tests.support.cluster import CHECKPOINTS, RESULTS
from tests.support.load.audit import SIMULATOR_END
from tests.support.load.connection import MERGE, Connection

Json = dict[str, Any]

RUN_SECONDS = 5.0
"""Least seconds that a pod runs. Otherwise the operator's answer to the start could be taken for the answer to the
end."""
_AT_ONCE = 16
_GONE = 404


@dataclass(frozen=True)
class PodKind:
    """How to recognize the pods of one kind of jobs, and their termination message."""

    job_label: str
    """Label with the name of the job."""
    container: str
    message: Callable[[Json], str]
    """Function from the labels of a pod to its termination message."""
    ends_last: Callable[[str], bool] = lambda _name: False
    """Function from the name of a pod to whether the pod ends after all other pods of its job. A PyTorchJob ends with
    its master, so its master must not end before a worker has run."""


class Simulator:
    """Simulates pods; pods of a job run without end until the job is released."""

    def __init__(self, connection: Connection, namespace: str, kind: PodKind, pods: int = 1) -> None:
        """`pods`: number of pods of a job, if some of them end last."""
        self._connection, self._kind = connection, kind
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._released: set[str] = set()
        self._held: defaultdict[str, list[Json]] = defaultdict(list)
        """Job -> its running pods."""
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._alive: dict[str, Json] = {}
        """UID -> running pod: started, not ended, not deleted."""
        self._deleted: set[str] = set()
        self._others_of_job = pods - 1
        self._last: dict[str, Json] = {}
        """Job -> its last pod, which still waits for the others to end."""
        self._ended: Counter[str] = Counter()
        """Job -> number of ended pods."""
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
        """Raise the errors of background tasks."""
        for task in self._tasks:
            if task.done():
                task.result()

    def release(self, job: str) -> None:
        """Let the job's pods end; pods of later phases end after they ran for a while."""
        self._released.add(job)
        for pod in self._held.pop(job, []):
            self._begin(self._end(pod))

    def alive(self) -> int:
        """Return the number of running pods."""
        return len(self._alive)

    async def lose(self) -> int:
        """Fail all running pods, as the pod garbage collector does after the loss of a node; return their number."""
        lost = [*self._alive.values()]
        self._alive.clear()
        self._held.clear()
        status = lost_with_node(self._kind, datetime.now(UTC))
        await asyncio.gather(*(self._patch(pod, status, "pod-loss") for pod in lost))
        return len(lost)

    async def _watch(self) -> None:
        """Watch the pods, again whenever the API server ends the watch, as it does for slow clients.

        The next watch starts with all existing pods.
        """
        known: set[str] = set()
        while True:
            async for change, pod in self._connection.watch(self._pods, self._kind.job_label):
                if change not in ("ADDED", "MODIFIED", "DELETED"):
                    continue  # a bookmark, or an error after which the API server ends the watch
                uid = pod["metadata"]["uid"]
                if change == "DELETED" or pod["metadata"].get("deletionTimestamp"):
                    self._deleted.add(uid)
                    self._alive.pop(uid, None)
                elif change == "ADDED" and uid not in known:
                    known.add(uid)
                    self._begin(self._start(pod))

    def _begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda done: None if done.cancelled() or done.exception() else self._tasks.discard(done))

    async def _start(self, pod: Json) -> None:
        await self._patch(pod, running(self._kind), "pod-start")
        self.started += 1
        uid = pod["metadata"]["uid"]
        if uid not in self._deleted:
            self._alive[uid] = pod
        await asyncio.sleep(RUN_SECONDS)
        if uid not in self._alive:
            return
        job = pod["metadata"]["labels"][self._kind.job_label]
        if job in self._released:
            await self._end(pod)
        else:
            self._held[job].append(pod)

    async def _end(self, pod: Json) -> None:
        job = pod["metadata"]["labels"][self._kind.job_label]
        if self._kind.ends_last(pod["metadata"]["name"]) and self._ended[job] < self._others_of_job:
            self._last[job] = pod
            return
        self._alive.pop(pod["metadata"]["uid"], None)
        await self._patch(pod, ended(self._kind, pod["metadata"]["labels"], datetime.now(UTC)), SIMULATOR_END)
        self._ended[job] += 1
        if self._ended[job] == self._others_of_job and job in self._last:
            await self._end(self._last.pop(job))

    async def _patch(self, pod: Json, status: Json, manager: str) -> None:
        path = f"{self._pods}/{pod['metadata']['name']}/status"
        async with self._places:
            try:
                await self._connection.request("PATCH", path, {"status": status}, MERGE, fieldManager=manager)
            except aiohttp.ClientResponseError as error:
                # The pod was deleted.
                if error.status != _GONE:
                    raise


def running(kind: PodKind) -> Json:
    return _status("Running", kind, {"running": {"startedAt": clock.to_text(datetime.now(UTC))}}, ready=True)


def ended(kind: PodKind, labels: Json, now: datetime) -> Json:
    terminated = {"exitCode": 0, "reason": "Completed", "message": kind.message(labels)}
    return _status("Succeeded", kind, {"terminated": terminated | {"finishedAt": clock.to_text(now)}}, ready=False)


def lost_with_node(kind: PodKind, now: datetime) -> Json:
    """Return the status of a pod whose node is gone."""
    terminated = {"exitCode": 137, "reason": "Error", "message": "", "finishedAt": clock.to_text(now)}
    failed = _status("Failed", kind, {"terminated": terminated}, ready=False)
    reason = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC", "message": "its node is gone"}
    return failed | {"conditions": [*failed["conditions"], reason]}


def _status(phase: str, kind: PodKind, state: Json, *, ready: bool) -> Json:
    container = {"name": kind.container, "image": "trainer", "imageID": "", "restartCount": 0, "ready": ready}
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {"phase": phase, "conditions": conditions, "containerStatuses": [container | {"state": state}]}


def _result(labels: Json) -> str:
    """Return the result of the stage named by the labels."""
    stage = "delink" if labels[LABEL_STAGE] == "delink" else labels[LABEL_PHASE]
    message = TerminationMessage(
        outcome="Succeeded",
        phase=labels[LABEL_PHASE],
        execution=int(labels[LABEL_EXECUTION]),
        checkpoint=CHECKPOINTS[stage],
        digest="0" * 64,
        **RESULTS[stage],
    )
    return message.to_json()


OURS = PodKind(LABEL_JOB, CONTAINER, _result)
