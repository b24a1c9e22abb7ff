"""`python -m pseudoreal_operator`: runs until SIGTERM. Liveness is at :8080/healthz."""

import asyncio
import signal
import sys
from contextlib import AsyncExitStack, suppress

import kopf
import structlog

from pseudoreal_operator.cluster.lease import LeaseLost, keep_lease
from pseudoreal_operator.cluster.login import connect, register_login
from pseudoreal_operator.endpoint.identity import Identities
from pseudoreal_operator.endpoint.server import Reports, serve_reports
from pseudoreal_operator.logs import configure_logs
from pseudoreal_operator.loop.census import Census
from pseudoreal_operator.loop.counts import Counts
from pseudoreal_operator.loop.handlers import register
from pseudoreal_operator.loop.kopf_settings import kopf_settings
from pseudoreal_operator.loop.loop import Loop
from pseudoreal_operator.loop.news import News
from pseudoreal_operator.loop.reconcile import Means
from pseudoreal_operator.metrics.registry import LEADER, REGISTRY
from pseudoreal_operator.metrics.server import serve_metrics
from pseudoreal_operator.observe.board import Board
from pseudoreal_operator.settings import Settings, read_settings


async def run(settings: Settings) -> None:
    registry, board, counts = kopf.OperatorRegistry(), Board(), Counts()
    register_login(registry)
    _end_on_sigterm()
    async with AsyncExitStack() as stack:
        if settings.metrics_port is not None:
            # Before the Lease: an operator that waits for it says so.
            await stack.enter_async_context(serve_metrics(REGISTRY, settings.metrics_port))
        if settings.lease:
            # With connections of its own: no other request holds up a renewal.
            await stack.enter_async_context(keep_lease(await stack.enter_async_context(connect()), settings.lease))
        LEADER.set(1)
        api = await stack.enter_async_context(connect())
        identities = Identities(api, settings.namespaces) if settings.reports else None
        if settings.reports and identities:
            await stack.enter_async_context(serve_reports(Reports(identities, board), settings.reports))
        REGISTRY.register(counts)
        loop = Loop(Means(api, settings, board, counts, News(api, counts)), identities, Census(REGISTRY))
        watching = await stack.enter_async_context(connect(connections=0))
        await stack.enter_async_context(loop.running(watching))
        register(registry, loop, counts, settings)
        await kopf.operator(
            registry=registry,
            settings=kopf_settings(),
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=list(settings.namespaces),
            liveness_endpoint=f"http://0.0.0.0:{settings.health_port}/healthz",
        )


def _end_on_sigterm() -> None:
    """Makes SIGTERM end the process until kopf handles signals: the first process of a container ignores those that it
    does not handle."""
    task = asyncio.current_task()
    assert task is not None, "this runs in a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def main() -> None:
    configure_logs()
    settings = read_settings()
    structlog.get_logger().info("started", image=settings.trainer_image, namespaces=settings.namespaces or "all")
    try:
        with suppress(asyncio.CancelledError):
            asyncio.run(run(settings))
    except LeaseLost as lost:
        structlog.get_logger().error("lease_lost", error=str(lost))
        sys.exit(1)


if __name__ == "__main__":
    main()
