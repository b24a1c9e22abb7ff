"""`/metrics`, over plain HTTP: numbers, and names of namespaces and jobs. Who may read them, the chart's NetworkPolicy
says."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from pseudoreal_operator.sockets import listening_socket

PATH = "/metrics"

log = structlog.get_logger()


@asynccontextmanager
async def serve_metrics(registry: CollectorRegistry, port: int) -> AsyncIterator[int]:
    """Serves while the context lasts: the port; a free one where 0 was asked for."""

    async def answer(request: web.Request) -> web.Response:
        # In the loop, not in a thread: what is collected changes only there.
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    application = web.Application()
    application.router.add_get(PATH, answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    try:
        await web.SockSite(runner, listening_socket(port)).start()
        found: int = runner.addresses[0][1]
        log.info("metrics_served", port=found)
        yield found
    finally:
        await runner.cleanup()
