"""The one place that reaches into asyncio's TLS: how much memory it takes for each connection.

asyncio gives each a buffer of 256 KiB, filled with zeros; there is no public way to say less. A thousand pods that
report would take 270 MB. A TLS record has 16 KiB at most, so no more are ever read at a time.
"""

from asyncio.sslproto import SSLProtocol

BUFFER_BYTES = 16 * 1024


def take_small_buffers() -> None:
    """Makes small buffers the default for all connections of the process that are made from now on, those to the API
    server among them."""
    SSLProtocol.max_size = BUFFER_BYTES
