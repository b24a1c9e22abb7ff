"""Client of the operator's report endpoint: one HTTPS request per report, on a kept-alive connection."""

import os
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPResponse, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

from pseudoreal_api.names import CONFIG_DIRECTORY, REPORT_CA_FILE, REPORT_TOKEN_DIRECTORY, REPORT_TOKEN_FILE
from pseudoreal_api.wire.authorities import AUTHORITIES_BYTES, authorities_digest, trust_sets
from pseudoreal_api.wire.reports import REPORT_AUTHORITIES, REPORT_URL, PodReport, ReportAnswer

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
