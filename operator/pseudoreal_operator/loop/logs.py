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
from pseudoreal_operator.observe.reading import newest_report
from pseudoreal_operator.observe.report_store import ReportingPod, ReportStore

LOG_LINES = 50
PAUSE_SECONDS = 1.0
"""Seconds between two log requests."""

log = structlog.get_logger()


async def read_logs(api: Api, report_store: ReportStore) -> NoReturn:
    while True:
        await asyncio.sleep(PAUSE_SECONDS)
        try:
            now = datetime.now(UTC)
            report_store.notice_silence(now)
            _show(report_store, now)
            if silent := report_store.most_silent(now):
                await _read_log(api, report_store, silent)
        except Exception as error:
            log.error("log_not_read", exc_info=error)


def _show(report_store: ReportStore, now: datetime) -> None:
    jobs = report_store.silent_jobs(now)
    for is_silent in (False, True):
        heard = sum(count for (_, silent), count in jobs.items() if silent is is_silent)
        REPORTING_JOBS.labels(heard=str(not is_silent).lower()).set(heard)
    PATH_CUT.set(report_store.path_is_cut)


async def _read_log(api: Api, report_store: ReportStore, reporter: ReportingPod) -> None:
    """Read one log. If it shows steps, the report store queues the job again."""
    try:
        report = newest_report(await api.log_tail(reporter.job[0], reporter.pod, CONTAINER, LOG_LINES))
    except (ApiException, ClientError, OSError) as error:
        log.debug("log_unreadable", pod=reporter.pod, error=str(error))
        return
    if report is not None:
        report_store.read_log(reporter, report, datetime.now(UTC))
