"""`python -m pseudoreal_operator`: runs until SIGTERM. Liveness is at /healthz, by default at port 8080.

Every operator watches; only the holder of the Lease makes reconcile passes and receives the pods' reports.
"""

import asyncio
import logging
import signal
import sys
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import structlog
from pseudoreal_api.spec.check import compile_rules

from pseudoreal_operator.cluster.api import Api
from pseudoreal_operator.cluster.fence import Fence
from pseudoreal_operator.cluster.lease import LeaseLost, keep_lease, lead_reports_here
from pseudoreal_operator.cluster.login import connect
from pseudoreal_operator.endpoint.certificate import Certificate, keep_fresh
from pseudoreal_operator.endpoint.identity import Identities
from pseudoreal_operator.endpoint.server import Reports, serve_reports
from pseudoreal_operator.loop.event_recorder import EventRecorder
from pseudoreal_operator.loop.job_metrics import JobMetrics
from pseudoreal_operator.loop.jobs_watch import JobsWatch
from pseudoreal_operator.loop.loop import Loop
from pseudoreal_operator.loop.reconcile import Dependencies
from pseudoreal_operator.metrics.registry import LEADER, REGISTRY, OperatorCounters
from pseudoreal_operator.metrics.server import serve_health, serve_metrics
from pseudoreal_operator.observe.report_store import ReportStore
from pseudoreal_operator.settings import Settings, read_settings
from pseudoreal_operator.tasks import background_task


async def run(settings: Settings) -> None:
    """Run the operator until SIGTERM or SIGINT. Raises LeaseLost if another operator takes the Lease."""
    ending = _catch_signals()
    compile_rules()  # otherwise the first plan would, within its limit of processor time
    report_store, counters = ReportStore(), OperatorCounters()
    REGISTRY.register(counters)
    async with AsyncExitStack() as stack:
        if settings.metrics_port is not None:
            await stack.enter_async_context(serve_metrics(REGISTRY, settings.metrics_port))
        fence = Fence() if settings.lease else None
        api = await stack.enter_async_context(connect(fence=fence))
        identities = Identities(api, settings.namespaces) if settings.reports else None
        loop = Loop(
            Dependencies(api, settings, report_store, counters, EventRecorder(api, counters)),
            identities,
            JobMetrics(REGISTRY),
            fence,
        )
        jobs = JobsWatch(loop, settings)

        def health_facts() -> dict[str, int]:
            return {"watchers": loop.live_watches + jobs.watched + 1, **vars(counters)}

        # Serve the probes before the first request to the API server, which may not answer.
        await stack.enter_async_context(serve_health(health_facts, lambda: loop.has_seen_all, settings.health_port))
        watching = await stack.enter_async_context(connect(connections=0))
        await stack.enter_async_context(loop.run_watches(watching))
        certificate = _load_certificate(settings, loop)
        reports = (
            Reports(identities, report_store, authorities=certificate.authorities_beyond)
            if identities and certificate
            else None
        )
        if certificate:
            # Keep the certificate fresh on a standby too: the leader may still serve a certificate whose key is in no
            # file any more, and the standby must have that certificate in memory when it takes over.
            await stack.enter_async_context(keep_fresh(certificate))
        await stack.enter_async_context(background_task("watch of jobs", jobs.run()))
        leading = asyncio.create_task(_lead(settings, fence, api, loop, reports, certificate), name="leading")
        await asyncio.wait([leading, ending], return_when=asyncio.FIRST_COMPLETED)
        # End the passes before the stack ends the watches and closes the connections, because running passes use both.
        leading.cancel()
        await asyncio.wait([leading])
        if not leading.cancelled():
            leading.result()


def _load_certificate(settings: Settings, loop: Loop) -> Certificate | None:
    if settings.reports is None:
        return None
    host = urlsplit(settings.report_url or "").hostname
    certificate = Certificate(settings.reports, host, loop.use_authorities)
    loop.use_authorities(certificate.authorities)
    return certificate


async def _lead(
    settings: Settings,
    fence: Fence | None,
    api: Api,
    loop: Loop,
    reports: Reports | None,
    certificate: Certificate | None,
) -> None:
    """Wait for the Lease, if one is used, and lead until cancelled. Raises LeaseLost."""
    # The contexts end in reverse order: passes and events, the endpoint, and last the Lease. While passes finish, the
    # Lease is still held, so their writes are sent; once it is released, another operator may write.
    async with AsyncExitStack() as stack:
        if settings.lease and fence:
            # The Lease has its own connections, so that no other request holds up a renewal.
            lease_api = await stack.enter_async_context(connect())
            await stack.enter_async_context(keep_lease(lease_api, settings.lease, fence))
        LEADER.set_function(lambda: float(fence is None or fence.is_open))
        if settings.reports and reports and certificate:
            await stack.enter_async_context(serve_reports(reports, certificate, settings.reports.port))
        await stack.enter_async_context(loop.lead())
        if settings.lease:
            # Move the label last, so that the Service selects this pod only once the endpoint serves and jobs are
            # followed.
            await lead_reports_here(api, settings.lease)
        await asyncio.Event().wait()


def _catch_signals() -> "asyncio.Future[None]":
    """Return a future that SIGTERM and SIGINT resolve: the first process of a container ignores signals without
    handlers."""
    ending = asyncio.get_running_loop().create_future()

    def end() -> None:
        if not ending.done():
            ending.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)
    return ending


_SHARED: list[structlog.typing.Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
]


def configure_logs() -> None:
    """Write log lines as JSON to stdout, including the lines of kopf and other libraries."""
    structlog.configure(
        processors=[*_SHARED, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*_SHARED, structlog.stdlib.add_logger_name],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # Routine lines are noise: a line for each request of a probe, each watch event, and each loop that ends as
    # intended.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    logging.getLogger("kopf.activities.probe").setLevel(logging.WARNING)
    logging.getLogger("kopf.objects").setLevel(logging.ERROR)


def main() -> None:
    configure_logs()
    settings = read_settings()
    structlog.get_logger().info(
        "operator_started", image=settings.trainer_image, namespaces=settings.namespaces or "all"
    )
    try:
        asyncio.run(run(settings))
    except LeaseLost as lost:
        structlog.get_logger().error("lease_lost", error=str(lost))
        sys.exit(1)


if __name__ == "__main__":
    main()
