"""Plain HTTP endpoints of the operator.

`/metrics` has numbers, and names of namespaces and jobs; `/healthz` and `/readyz` tell whether the operator is alive,
and whether it has seen all jobs. The chart's NetworkPolicy decides who may read them.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from pseudoreal_operator.sockets import listening_socket
from pseudoreal_operator.tasks import dead_tasks, live_tasks

PATH = "/metrics"

log = structlog.get_logger()


@asynccontextmanager
async def serve_metrics(registry: CollectorRegistry, port: int) -> AsyncIterator[int]:
    """Serve metrics in this context. Yield the port in use. `port` 0: a free port."""

    async def answer(request: web.Request) -> web.Response:
        # In the event loop, not in a thread: the collected values change only there.
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    async with _serve({PATH: answer}, port) as found:
        log.info("metrics_endpoint_started", port=found)
        yield found


@asynccontextmanager
async def serve_health(
    facts: Callable[[], Mapping[str, Any]], is_ready: Callable[[], bool], port: int
) -> AsyncIterator[int]:
    """Serve the probes in this context, even while the API server is away. Yield the port in use. `facts` returns
    values that are added to the answers of both probes."""

    async def health(_: web.Request) -> web.Response:
        dead = dead_tasks()
        return web.json_response({**facts(), "tasks": live_tasks(), "dead_tasks": dead}, status=500 if dead else 200)

    async def readiness(_: web.Request) -> web.Response:
        found = is_ready()
        return web.json_response({**facts(), "ready": found}, status=200 if found else 503)

    async with _serve({"/healthz": health, "/readyz": readiness}, port) as found:
        yield found


@asynccontextmanager
async def _serve(answers: Mapping[str, Any], port: int) -> AsyncIterator[int]:
    application = web.Application()
    for path, answer in answers.items():
        application.router.add_get(path, answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    try:
        await web.SockSite(runner, listening_socket(port)).start()
        found: int = runner.addresses[0][1]
        yield found
    finally:
        await runner.cleanup()
