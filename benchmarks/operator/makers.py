"""Compare who makes the pods of a phase: `python -m benchmarks.operator.makers [PODS ...] [MAKER ...]`.

The makers take turns, each on an empty control plane without nodes: one Indexed Job, as the operator makes it; one that
replaces lost pods; one Job for each place; and this program in the part of the operator. Each makes PODS pods with the
operator's own pod template. Then one pod is deleted and one fails, to see whether and when the place is filled again.
Then all pods succeed. Prints seconds, requests by their sender, bytes of the watches that an operator has on Jobs and
pods, and processor time of the servers.
"""

import asyncio
import copy
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_dev.cluster.control_plane import ControlPlane
from pseudoreal_operator.manifests.objects import children
from pseudoreal_operator.observe.stages import all_stages, pending_phases
from pseudoreal_operator.settings import Settings

from tests.support.jobs import good_job
from tests.support.load.connection import MERGE, Connection, connect
from tests.support.load.usage import usage

Json = dict[str, Any]

_AT_ONCE = 32
"""Requests of this program at a time."""
_PATIENCE_SECONDS = 240.0
_REFILL_SECONDS = 25.0
"""Longest wait for another pod in an empty place: longer than the Job controller's first two back-offs, 10 and 20 s."""
_JOBS, _PODS = "/apis/batch/v1/namespaces/default/jobs", "/api/v1/namespaces/default/pods"
_INDEX = "batch.kubernetes.io/job-completion-index"
_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "Metadata", "resources": [{"group": "batch"}, {"group": "", "resources": ["pods", "pods/status"]}]},
        {"level": "None"},
    ],
}
_SENDERS = {
    "admin": "program",
    "system:serviceaccount:kube-system:job-controller": "Job controller",
    "system:serviceaccount:kube-system:generic-garbage-collector": "garbage collector",
}


def _job(pods: int) -> Json:
    """Return the Job of a phase with this many workers, as the operator makes it."""
    body = good_job("sized", spec__phases__0__workers=pods, spec__phases__0__batch={"sequences": pods})
    body["metadata"] |= {"namespace": "default", "uid": "0a1b2c3d-0000-4000-8000-000000000000", "generation": 1}
    job = PseudoRealJob.from_object(body)
    status = PseudoRealJobStatus(execution=1, phases=pending_phases(job.spec))
    made = children(job, all_stages(job.spec)[0], status, Settings("registry.example/trainer:test", "IfNotPresent", ()))
    (found,) = [manifest for manifest in made if manifest["kind"] == "Job"]
    del found["metadata"]["ownerReferences"]  # the garbage collector would delete the child of an owner without object
    return found


@dataclass
class _Seen:
    """State of the cluster by two watches, as an operator has them."""

    pods: dict[str, Json] = field(default_factory=dict)
    jobs: dict[str, Json] = field(default_factory=dict)
    received: Counter[str] = field(default_factory=Counter)
    """Kind -> bytes of the watch."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def follow(self, connection: Connection, path: str, objects: dict[str, Json]) -> None:
        """Watch for ever; the API server ends a watch that lags behind."""
        version: str | None = None
        with suppress(asyncio.CancelledError):
            while True:
                async for change, body in connection.watch(path, "", version):
                    assert change != "ERROR", body
                    version = body["metadata"]["resourceVersion"]
                    if change != "BOOKMARK":
                        self._take_in(change, body, objects)

    def _take_in(self, change: str, body: Json, objects: dict[str, Json]) -> None:
        self.received[body["kind"]] += len(json.dumps(body, separators=(",", ":")))
        if change == "DELETED":
            objects.pop(body["metadata"]["name"], None)
        else:
            objects[body["metadata"]["name"]] = body
        self.changed.set()

    async def until(self, condition: Callable[[], bool], seconds: float = _PATIENCE_SECONDS) -> float | None:
        """Return the seconds until the condition holds; None if it does not hold in time."""
        begin = time.monotonic()
        while not condition():
            left = begin + seconds - time.monotonic()
            if left <= 0:
                return None
            self.changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, 1.0)):
                    await self.changed.wait()
        return time.monotonic() - begin


async def _each(doing: Iterable[Awaitable[object]]) -> None:
    """Await all, at most _AT_ONCE at a time."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(work: Awaitable[object]) -> None:
        async with gate:
            await work

    await asyncio.gather(*map(one, doing))


def _place(pod: Json) -> str:
    metadata = pod["metadata"]
    return str(metadata["labels"].get("place") or metadata["annotations"].get(_INDEX))


def _one_job_that_replaces(job: Json) -> list[Json]:
    """Return the Job with a common limit on failures instead of one per index: it makes another pod for a lost one."""
    one = copy.deepcopy(job)
    one["spec"] |= {"backoffLimit": 1000, "podReplacementPolicy": "TerminatingOrFailed"}
    del one["spec"]["backoffLimitPerIndex"]
    return [one]


def _job_for_each_place(job: Json) -> list[Json]:
    """Return a Job of one pod for each place. Each may fill its place again, after a back-off."""
    made = []
    for place in range(job["spec"]["completions"]):
        one = copy.deepcopy(job)
        one["metadata"]["name"] += f"-{place}"
        one["spec"] |= {"completions": 1, "parallelism": 1, "completionMode": "NonIndexed", "backoffLimit": 100}
        one["spec"] |= {"podReplacementPolicy": "TerminatingOrFailed"}
        del one["spec"]["backoffLimitPerIndex"]
        one["spec"]["template"]["metadata"]["labels"]["place"] = str(place)
        made.append(one)
    return made


def _pods(job: Json) -> list[Json]:
    return [_pod(job, place) for place in range(job["spec"]["completions"])]


def _pod(job: Json, place: int, attempt: int = 0) -> Json:
    pod: Json = copy.deepcopy(job["spec"]["template"]) | {"apiVersion": "v1", "kind": "Pod"}
    pod["metadata"]["labels"]["place"] = str(place)
    pod["metadata"] |= {"name": f"{job['metadata']['name']}-{place}-{attempt}"}
    return pod


MAKERS: dict[str, Callable[[Json], list[Json]]] = {
    "one Job": lambda job: [job],
    "one Job that replaces": _one_job_that_replaces,
    "a Job for each place": _job_for_each_place,
    "the operator": _pods,
}


@dataclass(frozen=True)
class Cost:
    made: float
    """Seconds until all pods existed."""
    refilled: dict[str, float | None]
    """Loss -> seconds until the place had another pod; None: it got none."""
    ended: float
    """Seconds from the first pod's end until the outcome of the phase was known."""
    cleared: float
    """Seconds until all objects were deleted."""
    requests: Counter[str]
    megabytes: Counter[str]
    processor: dict[str, float]


@asynccontextmanager
async def _watched(connection: Connection) -> AsyncIterator[_Seen]:
    seen = _Seen()
    watches = ((_JOBS, seen.jobs), (_PODS, seen.pods))
    tasks = [asyncio.create_task(seen.follow(connection, path, objects)) for path, objects in watches]
    try:
        yield seen
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _measure(maker: str, pods: int, plane: ControlPlane) -> Cost:
    job = _job(pods)
    objects = MAKERS[maker](job)
    path = _PODS if maker == "the operator" else _JOBS
    async with connect(plane.server) as connection, _watched(connection) as seen:
        begin = time.monotonic()
        await _each(connection.request("POST", path, body) for body in objects)
        assert await seen.until(lambda: len(seen.pods) >= pods) is not None, f"{len(seen.pods)} pods"
        made = time.monotonic() - begin
        refilled = {loss: await _refill(maker, job, loss, connection, seen) for loss in ("deleted", "failed")}
        begin = time.monotonic()
        done = set[str]()
        while not _is_over(maker, seen, pods):
            # The Job controller may fill a place late.
            left = [pod for name, pod in seen.pods.items() if _lives(pod) and name not in done]
            done |= {pod["metadata"]["name"] for pod in left}
            await _each(_end(connection, pod, "Succeeded") for pod in left)
            await seen.until(lambda: _is_over(maker, seen, pods), 1.0)
            assert time.monotonic() < begin + _PATIENCE_SECONDS, "the phase ends"
        ended = time.monotonic() - begin
        begin = time.monotonic()
        await connection.request("DELETE", path, {"propagationPolicy": "Background", "gracePeriodSeconds": 0})
        assert await seen.until(lambda: not seen.pods and not seen.jobs) is not None, "all is deleted"
        cleared = time.monotonic() - begin
    processor = {process.name: usage(process.pid).seconds for process in plane.processes}
    megabytes = Counter({kind: round(count / 1e6, 1) for kind, count in seen.received.items()})
    return Cost(made, refilled, ended, cleared, Counter(), megabytes, processor)


def _lives(pod: Json) -> bool:
    status, metadata = pod["status"], pod["metadata"]
    return bool(status["phase"] == "Pending" and "deletionTimestamp" not in metadata)


async def _refill(maker: str, job: Json, loss: str, connection: Connection, seen: _Seen) -> float | None:
    """Lose one pod, and return the seconds until its place has another one."""
    lost = next(pod for pod in seen.pods.values() if _lives(pod))
    name, place = lost["metadata"]["name"], _place(lost)
    if loss == "deleted":
        await connection.request("DELETE", f"{_PODS}/{name}", {"gracePeriodSeconds": 0})
    begin = time.monotonic()
    with suppress(aiohttp.ClientResponseError):  # without the Job controller's finalizer a deleted pod is gone
        await _end(connection, lost, "Failed")
    if maker == "the operator":
        await connection.request("POST", _PODS, _pod(job, int(place), 1))

    def is_filled() -> bool:
        return any(_place(pod) == place and key != name for key, pod in seen.pods.items())

    return None if await seen.until(is_filled, _REFILL_SECONDS) is None else time.monotonic() - begin


async def _end(connection: Connection, pod: Json, phase: str) -> None:
    # The Job controller counts its back-off from this time.
    finished = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    state = {"terminated": {"exitCode": int(phase == "Failed"), "finishedAt": finished}}
    said = {"name": "trainer", "state": state, "ready": False, "restartCount": 0, "image": "x", "imageID": ""}
    body = {"status": {"phase": phase, "containerStatuses": [said]}}
    await connection.request("PATCH", f"{_PODS}/{pod['metadata']['name']}/status", body, MERGE)


def _is_over(maker: str, seen: _Seen, pods: int) -> bool:
    if maker == "the operator":
        return len([pod for pod in seen.pods.values() if pod["status"]["phase"] == "Succeeded"]) >= pods
    ends = [
        c["type"] for job in seen.jobs.values() for c in job["status"].get("conditions", []) if c["status"] == "True"
    ]
    return sum(end in ("Complete", "Failed") for end in ends) >= len(seen.jobs)


def measure(maker: str, pods: int) -> Cost:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "audit.yaml").write_text(json.dumps(_POLICY))
        log = folder / "audit.log"
        arguments = [f"--audit-policy-file={folder / 'audit.yaml'}", f"--audit-log-path={log}"]
        with ControlPlane(folder, api_server_arguments=[*arguments, "--audit-log-maxsize=100000"]) as plane:
            cost = asyncio.run(_measure(maker, pods, plane))
        for line in log.read_bytes().splitlines():
            entry = json.loads(line)
            if entry["stage"] == "ResponseComplete" and entry["verb"] != "watch":
                by = entry["user"]["username"]
                ends = entry["objectRef"].get("subresource") == "status" and by == "admin"
                cost.requests["kubelets" if ends else _SENDERS.get(by, "others")] += 1
    return cost


def main() -> None:
    numbers = [int(word) for word in sys.argv[1:] if word.isdecimal()] or [1000]
    makers = [word for word in sys.argv[1:] if word in MAKERS] or [*MAKERS]
    for pods in numbers:
        for maker in makers:
            cost = measure(maker, pods)
            refilled = {loss: "never" if took is None else f"{took:.2f} s" for loss, took in cost.refilled.items()}
            print(f"{pods} pods by {maker}: made {cost.made:.1f} s, refilled {refilled}, ended {cost.ended:.1f} s,")
            print(f"  deleted {cost.cleared:.1f} s, requests {dict(cost.requests)}, MB {dict(cost.megabytes)},")
            print(f"  processor { ({name: round(took, 1) for name, took in cost.processor.items()}) }", flush=True)


if __name__ == "__main__":
    main()
