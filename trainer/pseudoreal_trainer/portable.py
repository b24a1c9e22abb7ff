"""Calls whose name or form differs between Linux and macOS, in one form."""

import os
import resource
import socket
import sys

_MOST_READ = 1 << 30
"""Maximum number of bytes of a request to read. macOS refuses more than 2 GiB - 1; Linux would read less."""


def loopback_interface() -> str:
    """Return the name of the loopback interface: lo on Linux, lo0 on macOS."""
    names = {name for _, name in socket.if_nameindex()}
    return "lo0" if "lo0" in names and "lo" not in names else "lo"


def peak_resident_bytes() -> int:
    """Return the largest resident memory that this process has had so far."""
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) counts bytes on macOS, KiB on Linux
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def read_at(descriptor: int, into: memoryview, offset: int) -> int:
    """Read from an offset of a file, as far as one request goes; return the number of bytes, 0 at the end of the file.

    macOS before version 11 lacks preadv, which reads without a copy.
    """
    into = into[:_MOST_READ]
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [into], offset)
    content = os.pread(descriptor, len(into), offset)
    into[: len(content)] = content
    return len(content)
