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
    # Read before the ranks: the ranks then belong to this restart or a later one.
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
        busy_seconds=record.busy_seconds,
        saving_seconds=None if record.save_began is None else max(0.0, now - record.save_began),
        process=process,
    )


_SECONDS = 4.0
"""Time limit in seconds of each socket operation of a request."""
_ANSWER_BYTES = 2 * AUTHORITIES_BYTES


class ReportRejected(Exception):
    def __init__(self, status: int, reason: str, retry_after: float) -> None:
        super().__init__(f"it answers {status} {reason}")
        self.retry_after = retry_after
        """Seconds to wait according to Retry-After; 0 without this header."""


@dataclass
class Endpoint:
    """Client of the report endpoint. Not thread-safe."""

    url: str
    token: Path
    """File of the service account token, renewed by the kubelet while the pod runs."""
    authority: Path
    """File with the CA certificates that verify the endpoint, as of the creation of the pod."""

    _learned: str | None = field(default=None, init=False, repr=False, compare=False)
    """CA certificates from the newest answer with certificates, as PEM text; None: no answer has had any.

    The operator's CA may be renewed during the life of the pod. The new certificates can be trusted, because each
    answer comes over a connection verified with certificates trusted before.
    """
    _accepted: str | None = field(default=None, init=False, repr=False, compare=False)
    """CA certificates with which the endpoint was last verified, as PEM text; None before the first verification."""
    _idle: HTTPSConnection | None = field(default=None, init=False, repr=False, compare=False)
    """Open connection of the previous report: a handshake costs more than a report."""

    def send(self, report: PodReport) -> ReportAnswer:
        """Send a report and return the operator's answer.

        Raises OSError, HTTPException, ValueError or ReportRejected.
        """
        content = report.to_json().encode()
        idle, self._idle = self._idle, None
        if idle is not None:
            # The operator may have closed the idle connection before it received this report: then send the report on a
            # new connection.
            with suppress(ConnectionError, ssl.SSLError):
                return self._store_authorities(self._exchange(idle, content))
        return self._store_authorities(self._exchange_on_new_connection(content))

    def _exchange_on_new_connection(self, content: bytes) -> ReportAnswer:
        """Send a report on a new connection. Several sets of CA certificates are tried in turn, the last accepted set
        first."""
        sets = trust_sets((self._learned or "") + self.authority.read_text(encoding="utf-8"))
        if not sets:
            raise ValueError(f"{self.authority} holds no certificate")
        sets.sort(key=lambda trusted: trusted != self._accepted)
        for trusted in sets:
            try:
                answer = self._exchange(self._connection(trusted), content)
            except ssl.SSLCertVerificationError:
                if trusted == sets[-1]:
                    raise
            else:
                self._accepted = trusted
                return answer
        raise AssertionError("the last set raises")

    def _connection(self, trusted: str) -> HTTPSConnection:
        context = ssl.create_default_context(cadata=trusted)
        return HTTPSConnection(urlsplit(self.url).netloc, timeout=_SECONDS, context=context)

    def _store_authorities(self, answer: ReportAnswer) -> ReportAnswer:
        """Return the answer, after storing its CA certificates."""
        for together in trust_sets(answer.authorities or "")[:1]:
            # Parse the text first: with anything but certificates in the text, every later connection would fail.
            with suppress(ssl.SSLError):
                ssl.create_default_context(cadata=together)
                self._learned = together
        return answer

    def _exchange(self, connection: HTTPSConnection, content: bytes) -> ReportAnswer:
        try:
            connection.request("POST", urlsplit(self.url).path or "/", content, self._headers())
            response = connection.getresponse()
            body = response.read(_ANSWER_BYTES)
            # Reuse the connection only after the whole response was read: leftover bytes would be parsed as the next
            # response.
            if response.isclosed() and not response.will_close:
                self._idle = connection
            return _answer(response, body)
        finally:
            if connection is not self._idle:
                connection.close()

    def _headers(self) -> dict[str, str]:
        token = self.token.read_text(encoding="utf-8").strip()
        trusted = authorities_digest(self._learned or self.authority.read_text(encoding="utf-8"))
        return {"Authorization": f"Bearer {token}", "Content-Type": "application/json", REPORT_AUTHORITIES: trusted}


def endpoint_of_pod() -> Endpoint | None:
    """Return the endpoint named by the pod's environment; None if reports are off."""
    if REPORT_URL not in os.environ:
        return None
    token = Path(REPORT_TOKEN_DIRECTORY) / REPORT_TOKEN_FILE
    return Endpoint(os.environ[REPORT_URL], token, Path(CONFIG_DIRECTORY) / REPORT_CA_FILE)


def _answer(response: HTTPResponse, content: bytes) -> ReportAnswer:
    if response.status != 200:
        raise ReportRejected(response.status, response.reason, _seconds(response.getheader("Retry-After")))
    return ReportAnswer.model_validate_json(content)


def _seconds(retry_after: str | None) -> float:
    """Return the seconds of a Retry-After header; 0 if the header is absent or holds a date. Rate-limiting servers
    send seconds."""
    return float(retry_after) if retry_after is not None and retry_after.isdecimal() else 0.0


_MOST_SECONDS = 60.0
_LAST_SECONDS = 1.0
"""Seconds to wait for the last report. If the pod was asked to stop, this report carries its last checkpoint."""
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

    `seconds`: interval without failures. `failures`: number of reports that have failed since the last success.
    `retry_after`: minimum delay in seconds after a failure, as requested by the endpoint; 0: none. `chance`: random
    number from 0 to 1 for jitter, so that pods that fail together do not retry together.
    """
    if failures == 0:
        return seconds
    back_off = min(_MOST_SECONDS, seconds * 2.0 ** min(failures, 10))
    return max(back_off * (0.5 + chance), min(retry_after, _MOST_RETRY_AFTER))


class _Reports:
    """Loop of the report thread. The report thread calls `run`, the main thread calls `end`."""

    def __init__(self, folder: PodFolder, endpoint: Endpoint, seconds: float) -> None:
        self._folder, self._endpoint, self._seconds = folder, endpoint, seconds
        self._failures = 0
        self._over, self._logging = threading.Event(), threading.Lock()

    def run(self) -> None:
        wait = 0.0
        while not self._over.wait(wait):
            wait = self._report()
        # Send the last report only if the previous report arrived: do not wait for an endpoint that is down.
        if not self._failures:
            self._report()

    def end(self) -> None:
        # The lock waits for a log line in progress: a daemon thread that writes while Python exits aborts the process.
        with self._logging:
            self._over.set()

    def _report(self) -> float:
        """Send a report and return the seconds until the next one."""
        retry_after = 0.0
        try:
            answer = self._endpoint.send(pod_report(self._folder))
            if answer.finish_phase:
                self._folder.ask_to_finish()
            if answer.restarts_in_place:
                self._folder.write_restarts_elsewhere(answer.restarts_in_place)
            if answer.membership is not None:
                self._folder.write_membership(answer.membership)
        except Exception as error:
            retry_after = error.retry_after if isinstance(error, ReportRejected) else 0.0
            self._count_failure(error)
        else:
            self._count_success()
        return delay(self._seconds, self._failures, retry_after, random.random())

    def _count_failure(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            self._log("reports_do_not_arrive", error=f"{type(error).__name__}: {error}", endpoint=self._endpoint.url)

    def _count_success(self) -> None:
        if self._failures:
            self._log("reports_arrive_again", failures=self._failures)
        self._failures = 0

    def _log(self, event: str, **facts: object) -> None:
        with self._logging:
            if not self._over.is_set():
                log.warning(event, **facts)
