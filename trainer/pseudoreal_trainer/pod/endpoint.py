"""The operator's end of the reports: a request over HTTPS for each, on one connection as long as it stands."""

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
"""Time limit in seconds for each step of a request."""
_ANSWER_BYTES = 2 * AUTHORITIES_BYTES


class Refused(Exception):
    def __init__(self, status: int, reason: str, retry_after: float) -> None:
        super().__init__(f"it answers {status} {reason}")
        self.retry_after = retry_after
        """Seconds that the operator asks to wait."""


@dataclass(frozen=True)
class Endpoint:
    url: str
    token: Path
    """File of the token; it is renewed while the pod runs."""
    authority: Path
    """File of the certificates that sign the endpoint's own, as they were when the pod was made."""

    _learned: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    """The certificates that an answer last said, if one did: the operator's authority may be renewed while the pod
    lives. Who said so was known by those before."""
    _accepted: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    """The set of authorities that last accepted the server, if one did."""
    _kept: list[HTTPSConnection] = field(default_factory=list, init=False, repr=False, compare=False)
    """The connection of the report before, if there is one: a handshake costs more than a report."""

    def send(self, report: PodReport) -> ReportAnswer:
        """Sends a report: the answer. For one thread at a time. Raises OSError, HTTPException, ValueError or
        Refused."""
        content = report.to_json().encode()
        if self._kept:
            # The other end may have closed it meanwhile; then nothing was heard.
            with suppress(ConnectionError, ssl.SSLError):
                return self._learned_from(self._exchange(self._kept.pop(), content))
        return self._learned_from(self._exchange_anew(content))

    def _exchange_anew(self, content: bytes) -> ReportAnswer:
        """Sends a report on a new connection, to a server that one set of the trusted authorities accepts."""
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
        """Return the answer, after trusting the authorities that it names."""
        for together in trust_sets(answer.authorities or "")[:1]:
            # Anything but certificates would break every connection from now on.
            with suppress(ssl.SSLError):
                ssl.create_default_context(cadata=together)
                self._learned[:] = [together]
        return answer

    def _exchange(self, connection: HTTPSConnection, content: bytes) -> ReportAnswer:
        try:
            connection.request("POST", urlsplit(self.url).path or "/", content, self._headers())
            response = connection.getresponse()
            body = response.read(_ANSWER_BYTES)
            # One that is not read to its end would be taken for the next answer.
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
    """The endpoint that the pod's environment names; None where there is nobody to report to."""
    if REPORT_URL not in os.environ:
        return None
    token = Path(REPORT_TOKEN_DIRECTORY) / REPORT_TOKEN_FILE
    return Endpoint(os.environ[REPORT_URL], token, Path(CONFIG_DIRECTORY) / REPORT_CA_FILE)


def _answer(response: HTTPResponse, content: bytes) -> ReportAnswer:
    if response.status != 200:
        raise Refused(response.status, response.reason, _seconds(response.getheader("Retry-After")))
    return ReportAnswer.model_validate_json(content)


def _seconds(retry_after: str | None) -> float:
    """The seconds of a Retry-After header; 0 for a date, which no server sends that limits a rate."""
    return float(retry_after) if retry_after is not None and retry_after.isdecimal() else 0.0
