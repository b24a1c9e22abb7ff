"""What lets a training pod report to the operator: an address, a token that opens nothing else, a certificate. Pure."""

from typing import Any

from pseudoreal_api.names import REPORT_CA_FILE, REPORT_TOKEN_DIRECTORY, REPORT_TOKEN_FILE
from pseudoreal_api.wire.reports import REPORT_AUDIENCE, REPORT_URL

from pseudoreal_operator.settings import Settings

Json = dict[str, Any]

TOKEN_SECONDS = 3600


def environment(settings: Settings) -> dict[str, str]:
    return {REPORT_URL: settings.report_url} if settings.report_url else {}


def files(settings: Settings) -> dict[str, str]:
    """The file with the certificate by which the operator is known."""
    return {REPORT_CA_FILE: settings.report_ca} if settings.report_url and settings.report_ca else {}


def volumes(settings: Settings) -> list[Json]:
    if not settings.report_url:
        return []
    token = {"audience": REPORT_AUDIENCE, "expirationSeconds": TOKEN_SECONDS, "path": REPORT_TOKEN_FILE}
    return [{"name": "report-token", "projected": {"sources": [{"serviceAccountToken": token}]}}]


def mounts(settings: Settings) -> list[Json]:
    if not settings.report_url:
        return []
    return [{"name": "report-token", "mountPath": REPORT_TOKEN_DIRECTORY, "readOnly": True}]
