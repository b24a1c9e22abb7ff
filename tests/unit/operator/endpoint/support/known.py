"""Pods with tokens that are known without an API server, and the TLS context of the endpoint."""

import ssl
from dataclasses import replace

from pseudoreal_dev.cluster.certificates import Authority
from pseudoreal_operator.endpoint.identity import Identities, Rejected
from pseudoreal_operator.observe.report_store import ReportingPod
from pseudoreal_operator.observe.stages import Execution, StageKind

HOST = "operator.test"
JOB = ("default", "job-uid")
POD = ReportingPod(JOB, Execution("pseudo", StageKind.TRAIN, 1), 0, "pod-0")


class KnownPods(Identities):
    """Accepts the tokens pod-0, pod-1, and so on, without an API server."""

    def __init__(self) -> None:
        """Create no API client and no caches, unlike the base class."""

    async def authenticate(self, token: str, address: str) -> ReportingPod:
        del address
        if not token.startswith("pod-"):
            raise Rejected(401, "the token is not valid")
        return replace(POD, index=int(token.removeprefix("pod-")), pod=token)


def make_tls_context(authority: Authority) -> ssl.SSLContext:
    """Return the server's TLS context, with the certificate that `authority` has issued as `tls`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.folder / "tls.crt", authority.folder / "tls.key")
    return context
