"""The operator's end of the reports: one request over HTTPS for each."""

import os
import ssl
from dataclasses import dataclass
from http.client import HTTPResponse, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

from pseudoreal_api.names import CONFIG_DIRECTORY, REPORT_CA_FILE, REPORT_TOKEN_DIRECTORY, REPORT_TOKEN_FILE
from pseudoreal_api.reports import REPORT_URL, PodReport, ReportAnswer

_SECONDS = 4.0
"""For each step of a request."""
_ANSWER_BYTES = 64 * 1024


class Refused(Exception):
    def __init__(self, status: int, reason: str, retry_after: float) -> None:
        super().__init__(f"it answers {status} {reason}")
        self.retry_after = retry_after
        """Seconds."""


@dataclass(frozen=True)
class Endpoint:
    url: str
    token: Path
    """File; it is renewed while the pod runs."""
    authority: Path
    """File: certificates that sign the endpoint's own. May be renewed as well."""

    def send(self, report: PodReport) -> ReportAnswer:
        """Raises OSError, HTTPException, ValueError or Refused."""
        where = urlsplit(self.url)
        context = ssl.create_default_context(cafile=str(self.authority))
        connection = HTTPSConnection(where.netloc, timeout=_SECONDS, context=context)
        try:
            connection.request("POST", where.path or "/", report.to_json().encode(), self._headers())
            return _answer(connection.getresponse())
        finally:
            connection.close()

    def _headers(self) -> dict[str, str]:
        token = self.token.read_text().strip()
        return {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}


def endpoint_of_pod() -> Endpoint | None:
    """None: there is nobody to report to."""
    if REPORT_URL not in os.environ:
        return None
    token = Path(REPORT_TOKEN_DIRECTORY) / REPORT_TOKEN_FILE
    return Endpoint(os.environ[REPORT_URL], token, Path(CONFIG_DIRECTORY) / REPORT_CA_FILE)


def _answer(response: HTTPResponse) -> ReportAnswer:
    content = response.read(_ANSWER_BYTES)
    if response.status != 200:
        raise Refused(response.status, response.reason, _seconds(response.getheader("Retry-After")))
    return ReportAnswer.model_validate_json(content)


def _seconds(retry_after: str | None) -> float:
    """0 for a date, which nobody sends who limits a rate."""
    return float(retry_after) if retry_after is not None and retry_after.isdecimal() else 0.0
