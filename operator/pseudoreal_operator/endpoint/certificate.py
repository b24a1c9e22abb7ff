"""The endpoint's certificate, and the authorities by which pods know it: files that a certificate manager replaces.

A pod trusts the authorities that it was made with, and those that an answer to one of its reports named since. So a
certificate whose authority is another one, as one that is its own authority and was renewed, is not served at once:
the one before it is, for a day and until shortly before it expires at most, while new executions and answers have both
authorities. A certificate that the known authorities accept is served at once.

The old certificate lives in the memory of both operators, the one that leads and the one that stands by: its key is in
no file any more. An operator that starts afterwards serves the new one, to pods that have learned of it since.
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

READ_AGAIN_SECONDS = 15.0
HOLD_SECONDS = 86_400.0
"""Most seconds for which a certificate is served after another one came: every pod that can report has learned of it
then."""
_MARGIN = 1 / 30
"""Share of its lifetime that a certificate has left when the next one is served, whoever trusts that: three days of
90."""

log = structlog.get_logger()


class Certificate:
    """What is served, and what pods are told to trust. Raises OSError for files that cannot be read at the start."""

    def __init__(
        self,
        files: ReportServer,
        host: str | None,
        changed: Callable[[str], None] = lambda _: None,
        clock: Clock = time.time,
    ) -> None:
        """`host`: the name by which pods know the endpoint; None: none reports. `changed` hears what the pods of new
        executions are to trust."""
        self._files, self._host, self._changed, self._clock = files, host, changed, clock
        self._content = _contents(files)
        self.context = _loaded(files)
        """What is served; it stays the same object."""
        self._trusted = _certificates(self._content[-1])
        """Authorities that the pods were made with, as far as this process knows."""
        self._until = self._served_until(self.context)
        self._is_pending = False
        self.authorities = self._trusted
        """Authorities that pods are to trust from now on."""
        if self._until is None and self._trusted and host is not None:
            log.error("certificate_untrusted", host=host, what_to_do="let ca.crt hold the authority of tls.crt")

    def beyond(self, digest: str) -> str | None:
        """What a pod is to trust that says this digest of what it trusts; None: nothing else, or it says nothing."""
        if not digest or not self.authorities or digest == authorities_digest(self.authorities):
            return None
        return self.authorities

    def look(self) -> None:
        """Reads the files again, where they have changed. Raises OSError; what is served stays."""
        content = _contents(self._files)
        if content == self._content and not self._is_pending:
            return
        if content != self._content:
            # Elsewhere first: a new certificate with the old key would spoil the one that is served.
            new = _loaded(self._files)
            if _contents(self._files) != content:
                return  # it changes just now
            if len(_certificates(content[-1])) > AUTHORITIES_BYTES:
                raise ValueError(f"{self._files.authority} holds more than {AUTHORITIES_BYTES} bytes of certificates")
            self._content = content
            self._take(new)
        if self._is_pending and (self._until is None or self._clock() >= self._until):
            self._serve()

    def _take(self, new: ssl.SSLContext) -> None:
        offered = _certificates(self._content[-1])
        # Those of the certificate that was to come next are left out: it is never served.
        self.authorities = _together(offered, self._trusted)
        self._is_pending = self._until is not None and self._validity(new) is None
        if self._is_pending and self._until is not None:
            self._until = min(self._until, self._clock() + HOLD_SECONDS)
            log.warning("certificate_held_back", why="pods do not trust its authority yet", seconds=self._left())
        else:
            self._serve()
        self._changed(self.authorities)

    def _serve(self) -> None:
        self.context.load_cert_chain(self._files.certificate, self._files.key)
        self._is_pending = False
        self._trusted = _certificates(self._content[-1])
        self._until = self._served_until(self.context)
        log.info("certificate_served", seconds=self._left())

    def _left(self) -> float | None:
        return None if self._until is None else round(self._until - self._clock())

    def _served_until(self, served: ssl.SSLContext) -> float | None:
        """The time, in seconds since 1970, until which a certificate can be served to pods that trust no later
        authority; None where they do not accept it anyway."""
        found = self._validity(served)
        if found is None:
            return None
        begun, expires = found
        CERTIFICATE_EXPIRES.set(expires)
        return expires - (expires - begun) * _MARGIN

    def _validity(self, served: ssl.SSLContext) -> tuple[float, float] | None:
        return _validity(self._trusted, served, self._host) if self._trusted and self._host else None


@asynccontextmanager
async def kept_fresh(certificate: Certificate, every: float = READ_AGAIN_SECONDS) -> AsyncIterator[None]:
    """Looks at the certificate's files again and again while the context lasts."""
    looking = asyncio.create_task(_look_again(certificate, every), name="certificate")
    try:
        yield
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking


async def _look_again(certificate: Certificate, every: float) -> None:
    while True:
        await asyncio.sleep(every)
        try:
            certificate.look()
        except (OSError, ValueError) as error:
            log.warning("certificate_unreadable", error=str(error))


def _contents(files: ReportServer) -> tuple[str, ...]:
    """Texts of the certificate, its key and the authorities."""
    read = (Path(file).read_text() for file in (files.certificate, files.key))
    return (*read, Path(files.authority).read_text() if files.authority else "")


def _loaded(files: ReportServer) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    return context


def _certificates(text: str) -> str:
    return "".join(certificates_in(text))


def _together(first: str, second: str) -> str:
    """The certificates of both; those of the second as far as there is room for them."""
    found = first
    for certificate in certificates_in(second):
        if certificate not in found and len(found) + len(certificate) <= AUTHORITIES_BYTES:
            found += certificate
    return found


def _validity(authorities: str, served: ssl.SSLContext, host: str) -> tuple[float, float] | None:
    """When the certificate of a server begins and ceases to be valid, in seconds since 1970; None where a client that
    trusts these authorities does not accept it."""
    found = (_handshake(trusted, served, host) for trusted in trust_sets(authorities))
    return next((validity for validity in found if validity), None)


def _handshake(trusted: str, served: ssl.SSLContext, host: str) -> tuple[float, float] | None:
    """Shakes hands in memory, as a pod and the endpoint do: the validity of the certificate, if it is accepted."""
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
    begun, expires = (ssl.cert_time_to_seconds(str(certificate[key])) for key in ("notBefore", "notAfter"))
    return begun, expires
