"""Reports of a pod to the operator: content, HTTPS client, and the daemon thread that sends them.

Failures of reports do not affect the training.
"""

import os
import random
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPResponse, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

import structlog
from pseudoreal_api.names import CONFIG_DIRECTORY, REPORT_CA_FILE, REPORT_TOKEN_DIRECTORY, REPORT_TOKEN_FILE
from pseudoreal_api.wire.authorities import AUTHORITIES_BYTES, authorities_digest, trust_sets
from pseudoreal_api.wire.reports import (
    REPORT_AUTHORITIES,
    REPORT_SECONDS,
    REPORT_URL,
    PodReport,
    RankReport,
    ReportAnswer,
)

from pseudoreal_trainer.runtime.heartbeat import HeartbeatRecord, process_state, read_heartbeat
from pseudoreal_trainer.runtime.pod_folder import PodFolder


def pod_report(folder: PodFolder) -> PodReport:
    # Read before the ranks: the ranks then belong to this restart or a later one, never to an earlier one.
    in_place = folder.in_place()
    return PodReport(
        ranks=rank_heartbeats(folder),
        progress=folder.progress(),
        checkpoint=folder.checkpoint(),
        layout=folder.layout(),
        in_place=in_place,
    )


def rank_heartbeats(folder: PodFolder) -> list[RankReport]:
    """Return the newest heartbeat of each started rank."""
    records = [record for record in map(read_heartbeat, folder.heartbeats()) if record is not None]
    return [rank_heartbeat(record, time.monotonic(), process_state(record.pid)) for record in records]


def rank_heartbeat(record: HeartbeatRecord, now: float, process: str) -> RankReport:
    """Return the report of one rank. Pure.

    `now` is in seconds of CLOCK_MONOTONIC; `process` is the result of `process_state`.
    """
    return RankReport(
        rank=record.rank,
        activity=record.activity,
        doing=record.doing,
        seconds=max(0.0, now - record.since),
        step=record.step,
        collectives=record.waits,
        busy_seconds=record.busy_seconds,
        saving_seconds=None if record.save_began is None else max(0.0, now - record.save_began),
        process=process,
    )


_SECONDS = 4.0
"""Time limit in seconds of each socket operation of a request."""
_ANSWER_BYTES = 2 * AUTHORITIES_BYTES


class Refused(Exception):
    def __init__(self, status: int, reason: str, retry_after: float) -> None:
        super().__init__(f"it answers {status} {reason}")
        self.retry_after = retry_after
        """Seconds to wait according to Retry-After; 0 without this header."""


@dataclass(frozen=True)
class Endpoint:
    url: str
    token: Path
    """File of the service account token, renewed by the kubelet while the pod runs."""
    authority: Path
    """File of the CA certificates for the endpoint's certificate, as of the creation of the pod."""

    _learned: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    """CA certificates from the newest answer with any, as at most one PEM text; empty before.

    The operator's CA may be renewed during the life of the pod. Each answer came over a connection verified by earlier
    trusted certificates.
    """
    _accepted: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    """Trust set of the last successful verification, as at most one entry."""
    _kept: list[HTTPSConnection] = field(default_factory=list, init=False, repr=False, compare=False)
    """Open connection of the previous report, as at most one entry: a handshake costs more than a report."""

    def send(self, report: PodReport) -> ReportAnswer:
        """Send a report and return the operator's answer. For one thread at a time.

        Raises OSError, HTTPException, ValueError or Refused.
        """
        content = report.to_json().encode()
        if self._kept:
            # The operator may have closed the idle connection; then it has not received this report, and a new one is
            # opened.
            with suppress(ConnectionError, ssl.SSLError):
                return self._learned_from(self._exchange(self._kept.pop(), content))
        return self._learned_from(self._exchange_anew(content))

    def _exchange_anew(self, content: bytes) -> ReportAnswer:
        """Send a report on a new connection, trying one trust set after the other."""
        sets = trust_sets("".join([*self._learned, self.authority.read_text()]))
        if not sets:
            raise ValueError(f"{self.authority} holds no certificate")
        sets.sort(key=lambda trusted: trusted not in self._accepted)
        for trusted in sets:
            try:
                answer = self._exchange(self._connection(trusted), content)
            except ssl.SSLCertVerificationError:
                if trusted == sets[-1]:
                    raise
            else:
                self._accepted[:] = [trusted]
                return answer
        raise AssertionError("the last set raises")

    def _connection(self, trusted: str) -> HTTPSConnection:
        context = ssl.create_default_context(cadata=trusted)
        return HTTPSConnection(urlsplit(self.url).netloc, timeout=_SECONDS, context=context)

    def _learned_from(self, answer: ReportAnswer) -> ReportAnswer:
        """Return the answer, after storing its CA certificates."""
        for together in trust_sets(answer.authorities or "")[:1]:
            # Parse the text first: with anything but certificates, every later connection would fail.
            with suppress(ssl.SSLError):
                ssl.create_default_context(cadata=together)
                self._learned[:] = [together]
        return answer

    def _exchange(self, connection: HTTPSConnection, content: bytes) -> ReportAnswer:
        try:
            connection.request("POST", urlsplit(self.url).path or "/", content, self._headers())
            response = connection.getresponse()
            body = response.read(_ANSWER_BYTES)
            # Reuse the connection only after the whole response was read: leftover bytes would be parsed as the next
            # response.
            if response.isclosed() and not response.will_close:
                self._kept.append(connection)
            return _answer(response, body)
        finally:
            if connection not in self._kept:
                connection.close()

    def _headers(self) -> dict[str, str]:
        token = self.token.read_text().strip()
        trusted = authorities_digest(self._learned[0] if self._learned else self.authority.read_text())
        return {"Authorization": f"Bearer {token}", "Content-Type": "application/json", REPORT_AUTHORITIES: trusted}


def endpoint_of_pod() -> Endpoint | None:
    """Return the endpoint named by the pod's environment; None if reports are off."""
    if REPORT_URL not in os.environ:
        return None
    token = Path(REPORT_TOKEN_DIRECTORY) / REPORT_TOKEN_FILE
    return Endpoint(os.environ[REPORT_URL], token, Path(CONFIG_DIRECTORY) / REPORT_CA_FILE)


def _answer(response: HTTPResponse, content: bytes) -> ReportAnswer:
    if response.status != 200:
        raise Refused(response.status, response.reason, _seconds(response.getheader("Retry-After")))
    return ReportAnswer.model_validate_json(content)


def _seconds(retry_after: str | None) -> float:
    """Return the seconds of a Retry-After header; 0 for an absent header or a date. Rate-limiting servers send
    seconds."""
    return float(retry_after) if retry_after is not None and retry_after.isdecimal() else 0.0


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
