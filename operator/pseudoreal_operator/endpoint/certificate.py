"""The endpoint's certificate, read again and again: a certificate manager replaces its files while we run."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import structlog

READ_AGAIN_SECONDS = 60.0

log = structlog.get_logger()


@asynccontextmanager
async def fresh_certificate(
    certificate: str, key: str, every: float = READ_AGAIN_SECONDS
) -> AsyncIterator[ssl.SSLContext]:
    context = _loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate, key)
    reading = asyncio.create_task(_read_again(context, certificate, key, every), name="certificate")
    try:
        yield context
    finally:
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading


async def _read_again(context: ssl.SSLContext, certificate: str, key: str, every: float) -> None:
    while True:
        await asyncio.sleep(every)
        try:
            # First elsewhere: a new certificate with the old key would spoil the one that is served.
            _loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate, key)
            _loaded(context, certificate, key)
        except OSError as error:
            log.warning("certificate_unreadable", error=str(error))


def _loaded(context: ssl.SSLContext, certificate: str, key: str) -> ssl.SSLContext:
    context.load_cert_chain(certificate, key)
    return context
