"""Pods that do not report: metrics of the jobs that are silent, and progress read from the pods' logs.

Nothing depends on this module, so it may cost next to nothing: one log request a second for all jobs together, whatever
their number, and none while all pods report.
"""

import asyncio
from datetime import UTC, datetime
from typing import NoReturn

import structlog
from aiohttp import ClientError
from kubernetes.aio.client import ApiException
from pseudoreal_api.names import CONTAINER

from pseudoreal_operator.cluster.api import Api
from pseudoreal_operator.metrics.registry import PATH_CUT, REPORTING_JOBS
from pseudoreal_operator.observe.board import Board, Speaker
from pseudoreal_operator.observe.reading import newest_report

LOG_LINES = 50
PAUSE_SECONDS = 1.0
"""Seconds between two log requests."""

log = structlog.get_logger()


async def read_logs(api: Api, board: Board) -> NoReturn:
    while True:
        await asyncio.sleep(PAUSE_SECONDS)
        try:
            now = datetime.now(UTC)
            board.notice_silence(now)
            _show(board, now)
            if silent := board.most_silent(now):
                await _read_log(api, board, silent)
        except Exception as error:
            log.error("log_not_read", exc_info=error)


def _show(board: Board, now: datetime) -> None:
    jobs = board.silent_jobs(now)
    for is_silent in (False, True):
        heard = sum(count for (_, silent), count in jobs.items() if silent is is_silent)
        REPORTING_JOBS.labels(heard=str(not is_silent).lower()).set(heard)
    PATH_CUT.set(board.path_is_cut)


async def _read_log(api: Api, board: Board, speaker: Speaker) -> None:
    """Read one log. If it shows steps, the board wakes the job."""
    try:
        report = newest_report(await api.log_tail(speaker.job[0], speaker.pod, CONTAINER, LOG_LINES))
    except (ApiException, ClientError, OSError) as error:
        log.debug("log_unreadable", pod=speaker.pod, error=str(error))
        return
    if report is not None:
        board.read_log(speaker, report, datetime.now(UTC))
