"""Size of asyncio's TLS buffers: the one place that reaches into asyncio's TLS.

asyncio gives each connection a buffer of 256 KiB, filled with zeros; no public setting makes it smaller. A thousand
reporting pods would take 270 MB. A TLS record has at most 16 KiB, so no read at a time needs more.
"""

from asyncio.sslproto import SSLProtocol

BUFFER_BYTES = 16 * 1024


def take_small_buffers() -> None:
    """Make small buffers the default for all later connections of the process, including connections to the API
    server."""
    SSLProtocol.max_size = BUFFER_BYTES
