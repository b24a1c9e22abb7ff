"""Compare kopf's watch of pods with the operator's own: `python -m benchmarks.operator.kopf_events`.

A server in another process lists no pods, and sends each of PODS pods EVENTS times over one watch, as fast as it is
read. Each watch runs in a process of its own, and calls a handler that reads the version. Prints the processor time of
an event and the memory of a pod. The watches take turns, so that other load affects both.
"""

import asyncio
import json
import multiprocessing
import os
import resource
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from statistics import median
from typing import Any, NamedTuple

import kopf
from aiohttp import web
from kubernetes.aio import client
from pseudoreal_operator.cluster.api import Api
from pseudoreal_operator.cluster.watch import Watch
from pseudoreal_operator.loop.jobs_watch import kopf_settings
from pseudoreal_operator.observe.memory import Memory

from benchmarks.quiet import quiet_machine

_PODS, _EVENTS, _ROUNDS = 2000, 5, 3
_LABEL = "pseudoreal.dev/job"
_PATIENCE_SECONDS = 120.0

Json = dict[str, Any]


class Cost(NamedTuple):
    milliseconds: float
    """Processor time of an event that the server sends."""
    kilobytes: float
    """Growth of the process's largest memory for a pod."""


def _pod(number: int, version: int) -> Json:
    """Return a pod of usual size, 6 kB: the fields that the API server and the kubelet fill in."""
    condition = {"status": "True", "lastProbeTime": None, "lastTransitionTime": "2030-01-01T00:00:00Z"}
    variables = [{"name": f"VARIABLE_{n}", "value": "x" * 40} for n in range(30)]
    managed = {"manager": "kubelet", "operation": "Update", "apiVersion": "v1", "fieldsV1": {"f:status": {"f:x": {}}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"job-real-{number}",
            "namespace": "team",
            "uid": f"00000000-0000-0000-0000-{number:012}",
            "resourceVersion": str(version),
            "creationTimestamp": "2030-01-01T00:00:00Z",
            "labels": {_LABEL: f"job-{number % 100}"},
            "managedFields": [managed] * 4,
        },
        "spec": {"containers": [{"name": "trainer", "image": "trainer", "env": variables}], "nodeName": "node"},
        "status": {
            "phase": "Running",
            "conditions": [condition | {"type": name} for name in ("Initialized", "Ready", "PodScheduled")],
            "containerStatuses": [{"name": "trainer", "ready": True, "restartCount": 0, "state": {"running": {}}}],
        },
    }


def _serve(port: Any) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/api/v1":
            verbs = {"verbs": ["list", "watch", "patch"]}
            pods = {"name": "pods", "kind": "Pod", "namespaced": True, "singularName": "pod"} | verbs
            # kopf waits until namespaces are served, also where their names are given.
            spaces = {
                "name": "namespaces",
                "kind": "Namespace",
                "namespaced": False,
                "singularName": "namespace",
            } | verbs
            return web.json_response({"kind": "APIResourceList", "groupVersion": "v1", "resources": [pods, spaces]})
        if not request.path.endswith("/pods"):
            return web.json_response({"groups": [], "versions": ["v1"], "resources": []})
        if "watch" not in request.query:
            return web.json_response({"kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": []})
        response = web.StreamResponse()
        await response.prepare(request)
        for version in range(_EVENTS):
            for number in range(_PODS):
                change = "MODIFIED" if version else "ADDED"
                line = {"type": change, "object": _pod(number, 2 + version * _PODS + number)}
                await response.write(json.dumps(line).encode() + b"\n")
        await asyncio.sleep(_PATIENCE_SECONDS)
        return response

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


class _Pods:
    """Pods whose last version has been seen. kopf leaves out versions that it has no time for."""

    def __init__(self) -> None:
        self._last, self.done = set[str](), asyncio.Event()

    def see(self, body: Any) -> None:
        metadata = body["metadata"]
        if int(metadata["resourceVersion"]) >= 2 + (_EVENTS - 1) * _PODS:
            self._last.add(metadata["name"])
        if len(self._last) == _PODS:
            self.done.set()


@asynccontextmanager
async def _watch_by_kopf(url: str, pods: _Pods) -> AsyncIterator[None]:
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**_: Any) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server=url)

    @kopf.on.event("v1", "pods", labels={_LABEL: kopf.PRESENT}, registry=registry)
    async def changed(event: Any, **_: Any) -> None:
        pods.see(event["object"])

    running = kopf.operator(
        registry=registry, settings=kopf_settings(), standalone=True, clusterwide=False, namespaces=["team"]
    )
    task = asyncio.create_task(running)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


@asynccontextmanager
async def _watch_by_us(url: str, pods: _Pods) -> AsyncIterator[None]:
    async with client.ApiClient(client.Configuration(host=url)) as api_client:
        memory = Memory()

        def changed(change: str, body: Json) -> None:
            memory.child_changed("Pod", change, body)
            pods.see(body)

        store = memory.watch("Pod", "team")
        watch = Watch(Api(api_client), "Pod", "team", _LABEL, store, changed, lambda: None)
        task = asyncio.create_task(watch.run(asyncio.Event()))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])


WATCHES: dict[str, Callable[[str, _Pods], Any]] = {"kopf": _watch_by_kopf, "own": _watch_by_us}


def _measure(watch: str, port: int, found: Any) -> None:
    async def run() -> None:
        pods = _Pods()
        before, begin = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
        async with WATCHES[watch](f"http://127.0.0.1:{port}", pods):
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await pods.done.wait()
            seconds, after = time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF)
        grown = (after.ru_maxrss - before.ru_maxrss) / _PODS
        found.put(Cost(1000 * seconds / (_PODS * _EVENTS), grown))

    asyncio.run(run())


def measure(watch: str) -> Cost:
    """Return the cost of one watch, in new processes."""
    spawn = multiprocessing.get_context("spawn")
    port, found = spawn.Queue(), spawn.Queue()
    server = spawn.Process(target=_serve, args=(port,), daemon=True)
    server.start()
    try:
        process = spawn.Process(target=_measure, args=(watch, port.get(timeout=60), found), daemon=True)
        process.start()
        cost: Cost = found.get(timeout=_PATIENCE_SECONDS + 30)
        process.join()
        return cost
    finally:
        server.kill()
        server.join()


def main() -> None:
    os.environ.setdefault("PYTHONHASHSEED", "0")
    with quiet_machine():
        costs: dict[str, list[Cost]] = {watch: [] for watch in WATCHES}
        for _ in range(_ROUNDS):
            for watch, of_watch in costs.items():
                of_watch.append(measure(watch))
        print("| watch | processor time of an event | memory of a pod |\n| --- | ---: | ---: |")
        for watch, of_watch in costs.items():
            milliseconds, kilobytes = (median(column) for column in zip(*of_watch, strict=True))
            print(f"| {watch} | {milliseconds:.2f} ms | {kilobytes:.1f} kB |")


if __name__ == "__main__":
    main()
