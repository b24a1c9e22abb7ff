"""The endpoint's certificate, and the certificate authorities (CAs) by which pods verify it: files that a certificate
manager replaces.

A pod trusts the CAs that it was created with, and CAs that later answers to its reports named. A new certificate that
the known CAs accept is served at once. A new certificate with an unknown CA, such as a renewed self-signed one, is held
back: its predecessor is served for another day, or until shortly before the predecessor expires if that is earlier.
Meanwhile new executions and answers get the CAs of both.

The old certificate lives in the memory of both operators, the leader and the standby: its key is in no file any more.
An operator that starts later serves the new certificate, to pods that have learned of its CA since.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import structlog
from pseudoreal_api.wire.authorities import AUTHORITIES_BYTES, authorities_digest, certificates_in, trust_sets

from pseudoreal_operator.endpoint.limits import Clock
from pseudoreal_operator.metrics.registry import CERTIFICATE_EXPIRES
from pseudoreal_operator.settings import ReportServer

RELOAD_SECONDS = 15.0
HOLD_SECONDS = 86_400.0
"""Maximum seconds for which the old certificate is served after a new one came. By then every pod that can report has
learned of the new CA."""
_MARGIN = 1 / 30
"""Remaining share of a certificate's lifetime at which the next certificate is served, even if pods do not trust it:
three days of 90."""

log = structlog.get_logger()


class Certificate:
    """The served certificate, and the CAs that pods are to trust. Raises OSError if the files cannot be read at
    the start."""

    def __init__(
        self,
        files: ReportServer,
        host: str | None,
        changed: Callable[[str], None] = lambda _: None,
        clock: Clock = time.time,
    ) -> None:
        """`host`: name by which pods know the endpoint; None: no pod reports. `changed` is called with the CAs for pods
        of new executions."""
        self._files, self._host, self._changed, self._clock = files, host, changed, clock
        self._content = _read_files(files)
        self.context = _load_context(files)
        """TLS context of the endpoint, always the same object; `_serve` loads new certificates into it."""
        self._trusted = _certificates(self._content[-1])
        """CAs that the pods were created with, as far as this process knows."""
        self._until = self._served_until(self.context)
        self._is_pending = False
        self.authorities = self._trusted
        """CAs that pods are to trust from now on."""
        if self._until is None and self._trusted and host is not None:
            log.error("certificate_untrusted", host=host, what_to_do="let ca.crt hold the authority of tls.crt")

    def authorities_beyond(self, digest: str) -> str | None:
        """Return the CAs to send to a pod; None if the pod has them or sent no digest. `digest`: digest of the CAs that
        the pod trusts."""
        if not digest or not self.authorities or digest == authorities_digest(self.authorities):
            return None
        return self.authorities

    def reload(self) -> None:
        """Read the files again if they have changed. Raises OSError or ValueError; the served certificate stays."""
        content = _read_files(self._files)
        if content == self._content and not self._is_pending:
            return
        if content != self._content:
            # Load into another context first: a new certificate with the old key would break the served one.
            new = _load_context(self._files)
            if _read_files(self._files) != content:
                return  # the files are being replaced right now
            if len(_certificates(content[-1])) > AUTHORITIES_BYTES:
                raise ValueError(f"{self._files.authority} holds more than {AUTHORITIES_BYTES} bytes of certificates")
            self._content = content
            self._accept(new)
        if self._is_pending and (self._until is None or self._clock() >= self._until):
            self._serve()

    def _accept(self, new: ssl.SSLContext) -> None:
        """Serve the new certificate, or hold it back until the pods know its CA; send its CA to pods from now on."""
        offered = _certificates(self._content[-1])
        # Merge before `_serve`, which replaces `_trusted`. The CAs of the old certificate are still sent to pods,
        # because the old certificate is served for a while longer, here or by the other operator. The CAs of a
        # certificate that was pending until now are left out: that certificate is never served.
        self.authorities = _merge(offered, self._trusted)
        self._is_pending = self._until is not None and self._validity(new) is None
        if self._is_pending and self._until is not None:
            self._until = min(self._until, self._clock() + HOLD_SECONDS)
            # Send the new CA first, and serve the certificate later: a pod receives the new CA only over a connection
            # that the pod accepts.
            log.warning(
                "certificate_held_back", why="pods do not trust its authority yet", seconds_left=self._seconds_left()
            )
        else:
            self._serve()
        self._changed(self.authorities)

    def _serve(self) -> None:
        self.context.load_cert_chain(self._files.certificate, self._files.key)
        self._is_pending = False
        self._trusted = _certificates(self._content[-1])
        self._until = self._served_until(self.context)
        log.info("certificate_served", seconds_left=self._seconds_left())

    def _seconds_left(self) -> float | None:
        return None if self._until is None else round(self._until - self._clock())

    def _served_until(self, served: ssl.SSLContext) -> float | None:
        """Return the time until which the certificate can be served to pods that trust no newer CA, in seconds since
        1970; None if these pods reject the certificate. Also export its expiry as a metric."""
        found = self._validity(served)
        if found is None:
            return None
        begins, expires = found
        CERTIFICATE_EXPIRES.set(expires)
        return expires - (expires - begins) * _MARGIN

    def _validity(self, served: ssl.SSLContext) -> tuple[float, float] | None:
        return _validity(self._trusted, served, self._host) if self._trusted and self._host else None


@asynccontextmanager
async def keep_fresh(certificate: Certificate, every: float = RELOAD_SECONDS) -> AsyncIterator[None]:
    """Check the certificate's files periodically in this context."""
    looking = asyncio.create_task(_reload_periodically(certificate, every), name="certificate")
    try:
        yield
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking


async def _reload_periodically(certificate: Certificate, every: float) -> None:
    while True:
        await asyncio.sleep(every)
        try:
            certificate.reload()
        except (OSError, ValueError) as error:
            log.warning("certificate_unreadable", error=str(error))


def _read_files(files: ReportServer) -> tuple[str, ...]:
    """Return the texts of the certificate, its key and its CAs."""
    read = (Path(file).read_text() for file in (files.certificate, files.key))
    return (*read, Path(files.authority).read_text() if files.authority else "")


def _load_context(files: ReportServer) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    return context


def _certificates(text: str) -> str:
    return "".join(certificates_in(text))


def _merge(first: str, second: str) -> str:
    """Return the certificates of both texts, without duplicates. Certificates of the second text that would exceed
    AUTHORITIES_BYTES are left out."""
    found = first
    for certificate in certificates_in(second):
        if certificate not in found and len(found) + len(certificate) <= AUTHORITIES_BYTES:
            found += certificate
    return found


def _validity(authorities: str, served: ssl.SSLContext, host: str) -> tuple[float, float] | None:
    """Return notBefore and notAfter of the server's certificate, in seconds since 1970; None if a client that trusts
    these CAs rejects the certificate."""
    found = (_handshake(trusted, served, host) for trusted in trust_sets(authorities))
    return next((validity for validity in found if validity), None)


def _handshake(trusted: str, served: ssl.SSLContext, host: str) -> tuple[float, float] | None:
    """Perform a TLS handshake in memory, as between a pod and the endpoint. Return the validity of the certificate;
    None if the client rejects it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = served.wrap_bio(to_server, to_client, server_side=True)
    try:
        trusting = ssl.create_default_context(cadata=trusted)
        client = trusting.wrap_bio(to_client, to_server, server_hostname=host)
        for end in (client, server, client):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLError:
        return None
    certificate = client.getpeercert() or {}
    begins, expires = (ssl.cert_time_to_seconds(str(certificate[key])) for key in ("notBefore", "notAfter"))
    return begins, expires
