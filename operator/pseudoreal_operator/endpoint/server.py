"""The HTTPS endpoint to which training pods report; each pod reports for its own job only."""

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import structlog
from aiohttp import ClientError, web
from aiohttp.typedefs import Handler
from kubernetes.aio.client import ApiException
from pseudoreal_api.wire.reports import REPORT_AUTHORITIES, REPORT_BYTES, REPORT_PATH, PodReport

from pseudoreal_operator.cluster.bounds import Unreadable
from pseudoreal_operator.endpoint.certificate import Certificate
from pseudoreal_operator.endpoint.identity import Identities, Rejected
from pseudoreal_operator.endpoint.limits import Clock, Limiter
from pseudoreal_operator.endpoint.listener import IDLE_SECONDS, Listener
from pseudoreal_operator.metrics.registry import REPORTS
from pseudoreal_operator.observe.reading import read_report
from pseudoreal_operator.observe.report_store import ReportingPod, ReportStore

PER_SECOND, BURST = 1.0, 5.0
"""Limits on the reports of one pod: reports per second, and burst. A pod sends one report every few seconds."""
READ_SECONDS = 10.0
"""Time limit for the body of a report."""
RETRY_SECONDS = 10
_RETRY_LATER = (429, 503)
_KEPT_OPEN = (200, 503)
"""HTTP statuses after which a connection stays open. A rejected client must connect again for each attempt: handshakes
are limited."""
_REPORTER = web.RequestKey("reporting_pod", ReportingPod)

log = structlog.get_logger()


class Reports:
    """Handler of reports: identifies the pod, stores its report, and answers."""

    def __init__(
        self,
        identities: Identities,
        report_store: ReportStore,
        clock: Clock = time.monotonic,
        authorities: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        """`authorities`: function from the digest of the CAs that a pod trusts to the CAs to send to the pod, such as
        `Certificate.authorities_beyond`. The function returns None if there are none to send."""
        self._identities, self._report_store, self._authorities = identities, report_store, authorities
        # Per pod, not per token: the owner of a pod may create any number of tokens, and change its labels and index.
        self._limiter = Limiter(PER_SECOND, BURST, clock)
        self._log_limit = Limiter(per_second=0.1, burst=1, clock=clock)

    async def receive(self, request: web.Request) -> web.Response:
        try:
            reporter = request[_REPORTER] = await self._authenticate(request)
            if not self._limiter.allows((reporter.job[0], reporter.pod)):
                raise Rejected(429, "one report a second is enough")
            report, now = await _read_body(request), datetime.now(UTC)
            if not self._report_store.store(reporter, report, now):
                raise Rejected(
                    503,
                    "the operator does not follow the job of this pod yet, or not any more, or the job has no phase"
                    f" {reporter.execution.phase} with a pod {reporter.index}",
                )
        except Rejected as rejection:
            headers = {"Retry-After": str(RETRY_SECONDS)} if rejection.status in _RETRY_LATER else {}
            return web.Response(status=rejection.status, text=str(rejection), headers=headers)
        trusts = self._authorities(request.headers.get(REPORT_AUTHORITIES, ""))
        answer = self._report_store.answer(reporter, now).model_copy(update={"authorities": trusts})
        return web.Response(text=answer.to_json(), content_type="application/json")

    async def _authenticate(self, request: web.Request) -> ReportingPod:
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        if kind != "Bearer" or not token:
            raise Rejected(401, "send the projected token as Authorization: Bearer")
        try:
            return await self._identities.authenticate(token, request.remote or "")
        except (ApiException, ClientError, OSError, Unreadable) as error:
            self.log_rarely("token_not_verified", error=str(error))
            raise Rejected(503, "the API server cannot tell whose token this is; report again later") from error

    def log_rarely(self, event: str, **facts: object) -> None:
        """Log a problem, at most once in ten seconds: anyone may cause it as often as they like."""
        if self._log_limit.allows("all"):
            log.warning(event, **facts)


async def _read_body(request: web.Request) -> PodReport:
    try:
        async with asyncio.timeout(READ_SECONDS):
            return read_report(await request.read())
    except TimeoutError:
        raise Rejected(408, f"the report did not arrive within {READ_SECONDS:.0f} s") from None
    except ValueError as error:
        raise Rejected(400, f"this is no report: {error}") from None


def make_application(reports: Reports, listener: Listener) -> web.Application:
    @web.middleware
    async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            answer = await handler(request)
        except web.HTTPException as rejection:
            REPORTS.labels(status=rejection.status).inc()
            rejection.force_close()
            raise
        except Exception as error:
            reports.log_rarely("report_failed", exc_info=error)
            answer = web.Response(status=500)
        REPORTS.labels(status=answer.status).inc()
        if answer.status not in _KEPT_OPEN:
            answer.force_close()
        elif _REPORTER in request:
            listener.recognize(request.protocol, request[_REPORTER])
        return answer

    made = web.Application(client_max_size=REPORT_BYTES, middlewares=[counted])
    made.router.add_post(REPORT_PATH, reports.receive)
    return made


@asynccontextmanager
async def serve_reports(reports: Reports, certificate: Certificate, port: int) -> AsyncIterator[None]:
    async with run_endpoint(reports, certificate.context, port) as found:
        log.info("report_endpoint_started", port=found)
        yield


@asynccontextmanager
async def run_endpoint(reports: Reports, tls: ssl.SSLContext, port: int) -> AsyncIterator[int]:
    """Run the endpoint in this context. Yield the port in use. `port` 0: a free port."""
    listener = Listener(tls)
    served = make_application(reports, listener)
    # aiohttp logs a traceback for each client that sends something other than HTTP.
    quiet = logging.getLogger("pseudoreal.reports")
    quiet.setLevel(logging.CRITICAL)
    runner = web.AppRunner(served, access_log=None, logger=quiet, shutdown_timeout=2.0, keepalive_timeout=IDLE_SECONDS)
    await runner.setup()
    try:
        assert runner.server is not None, "setup() creates the server"
        async with listener.listen(runner.server, port) as found:
            yield found
    finally:
        await runner.cleanup()
