"""The endpoint that training pods report to: HTTPS, and only for the job of the pod that calls."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog
from aiohttp import ClientError, web
from kubernetes.aio.client import ApiException
from pseudoreal_api.reports import REPORT_BYTES, REPORT_PATH, PodReport, ReportAnswer
from pydantic import ValidationError

from pseudoreal_operator.api import Api
from pseudoreal_operator.reports.board import Board
from pseudoreal_operator.reports.identity import Identities, NotAllowed
from pseudoreal_operator.reports.limits import Limiter

PER_SECOND, BURST = 1.0, 5.0
"""Reports of one pod, which sends one every few seconds."""
_RETRY = {"Retry-After": "10"}

log = structlog.get_logger()


@dataclass(frozen=True)
class ReportServer:
    """Where to listen, and files of a certificate and its key."""

    port: int
    certificate: str
    key: str


class Reports:
    def __init__(self, identities: Identities, board: Board) -> None:
        self._identities, self._board = identities, board
        self._limiter = Limiter(PER_SECOND, BURST)

    async def receive(self, request: web.Request) -> web.Response:
        try:
            return await self._received(request)
        except NotAllowed as refusal:
            headers = _RETRY if refusal.status == 429 else {}
            return web.Response(status=refusal.status, text=str(refusal), headers=headers)
        except ValidationError as error:
            return web.Response(status=400, text=f"not a report: {error.error_count()} fields are wrong")
        except (ApiException, ClientError, OSError) as error:
            log.warning("report_unverified", error=str(error))
            return web.Response(status=503, text="the API server cannot tell whose token this is", headers=_RETRY)

    async def _received(self, request: web.Request) -> web.Response:
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        if kind != "Bearer" or not token:
            raise NotAllowed(401, "send the projected token as Authorization: Bearer")
        if not self._limiter.allows(token):
            raise NotAllowed(429, "one report a second is enough")
        speaker = await self._identities.of(token)
        report = PodReport.model_validate_json(await request.read())
        self._board.hear(speaker, report, datetime.now(UTC))
        answer = ReportAnswer(finish_phase=self._board.is_to_finish(speaker))
        return web.Response(text=answer.to_json(), content_type="application/json")


@asynccontextmanager
async def serve_reports(api: Api, board: Board, where: ReportServer) -> AsyncIterator[None]:
    application = web.Application(client_max_size=REPORT_BYTES)
    application.router.add_post(REPORT_PATH, Reports(Identities(api), board).receive)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(where.certificate, where.key)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    await web.TCPSite(runner, port=where.port, ssl_context=tls).start()
    log.info("reports_served", port=where.port)
    try:
        yield
    finally:
        await runner.cleanup()
