"""Sends the pod's reports to the operator from a daemon thread; failures do not affect the training."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from pseudoreal_api.wire.reports import REPORT_SECONDS

from pseudoreal_trainer.runtime.endpoint import Endpoint, Refused
from pseudoreal_trainer.runtime.heartbeats import pod_report
from pseudoreal_trainer.runtime.pod_folder import PodFolder

_MOST_SECONDS = 60.0
_LAST_SECONDS = 1.0
"""Seconds to wait for the last report. It carries the checkpoint of a pod asked to stop."""
_MOST_RETRY_AFTER = 600.0

log = structlog.get_logger()


@contextmanager
def reporting(folder: PodFolder, endpoint: Endpoint | None, seconds: float = REPORT_SECONDS) -> Iterator[None]:
    """Report every `seconds` inside the context, and once at its end."""
    if endpoint is None:
        yield
        return
    reports = _Reports(folder, endpoint, seconds)
    # A daemon thread, joined for a limited time: an endpoint that hangs cannot keep the pod from ending.
    thread = threading.Thread(target=reports.run, name="reports", daemon=True)
    thread.start()
    try:
        yield
    finally:
        reports.end()
        thread.join(_LAST_SECONDS)


def delay(seconds: float, failures: int, retry_after: float, chance: float) -> float:
    """Return the seconds until the next report. Pure.

    `chance`, from 0 to 1, adds jitter: pods failing together do not retry together.
    """
    if failures == 0:
        return seconds
    back_off = min(_MOST_SECONDS, seconds * 2.0 ** min(failures, 10))
    return max(back_off * (0.5 + chance), min(retry_after, _MOST_RETRY_AFTER))


class _Reports:
    def __init__(self, folder: PodFolder, endpoint: Endpoint, seconds: float) -> None:
        self._folder, self._endpoint, self._seconds = folder, endpoint, seconds
        self._failures = 0
        self._over, self._speaking = threading.Event(), threading.Lock()

    def run(self) -> None:
        wait = 0.0
        while not self._over.wait(wait):
            wait = self._report()
        # Send the last report only if the previous one arrived: do not wait for an endpoint that is down.
        if not self._failures:
            self._report()

    def end(self) -> None:
        # Waits for a log line in progress: a daemon thread that is writing one as Python exits would abort the process.
        with self._speaking:
            self._over.set()

    def _report(self) -> float:
        """Send a report and return the seconds until the next one."""
        retry_after = 0.0
        try:
            answer = self._endpoint.send(pod_report(self._folder))
            if answer.finish_phase:
                self._folder.ask_to_finish()
            if answer.restarts_in_place:
                self._folder.leave_restarts_elsewhere(answer.restarts_in_place)
            if answer.membership is not None:
                self._folder.leave_membership(answer.membership)
        except Exception as error:
            retry_after = error.retry_after if isinstance(error, Refused) else 0.0
            self._failed(error)
        else:
            self._succeeded()
        return delay(self._seconds, self._failures, retry_after, random.random())

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            self._say("reports_do_not_arrive", error=f"{type(error).__name__}: {error}", endpoint=self._endpoint.url)

    def _succeeded(self) -> None:
        if self._failures:
            self._say("reports_arrive_again", failures=self._failures)
        self._failures = 0

    def _say(self, event: str, **facts: object) -> None:
        with self._speaking:
            if not self._over.is_set():
                log.warning(event, **facts)
