"""Answers to the kubelet's probes."""

import asyncio

from aiohttp import ClientSession
from pseudoreal_operator.metrics.registry import REGISTRY
from pseudoreal_operator.metrics.server import serve_health
from pseudoreal_operator.tasks import background_task, live_tasks


async def test_task_that_ends_fails_the_liveness_probe_whatever_ends_it() -> None:
    async def fail() -> None:
        raise RecursionError

    async with serve_health(lambda: {"watchers": 3}, lambda: True, port=0) as port, ClientSession() as session:
        for what in (asyncio.sleep(0), fail()):
            async with background_task("watch of Pod", asyncio.sleep(1000)), background_task("worker 1", what) as ends:
                await asyncio.wait([ends])
                answer = await session.get(f"http://127.0.0.1:{port}/healthz")
                assert answer.status == 500
                assert await answer.json() == {"watchers": 3, "tasks": ["watch of Pod"], "dead_tasks": ["worker 1"]}
                assert REGISTRY.get_sample_value("pseudoreal_dead_tasks") == 1
        assert live_tasks() == [], "who ends them on purpose takes them out"
        answer = await session.get(f"http://127.0.0.1:{port}/healthz")
        assert (answer.status, await answer.json()) == (200, {"watchers": 3, "tasks": [], "dead_tasks": []})


async def test_operator_is_ready_once_it_has_seen_all_jobs() -> None:
    ready: list[int] = []
    async with serve_health(dict, lambda: bool(ready), port=0) as port, ClientSession() as session:
        for status in (503, 200):
            assert (await session.get(f"http://127.0.0.1:{port}/readyz")).status == status
            ready.append(1)
