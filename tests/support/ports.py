"""Free ports of this machine."""

import secrets
import socket

_PORTS = range(12_000, 30_000)
"""Ports below ip_local_port_range and below the node ports of the cluster."""


def free_port() -> int:
    """Return a free port of the loopback interface.

    It is outside the range of ports assigned by Linux to connections and to listeners without a port, so nothing takes
    the port between this call and its use.
    """
    while True:
        if is_free(port := secrets.choice(_PORTS)):
            return port


def free_ports(count: int) -> range:
    """Return consecutive free ports of the loopback interface."""
    while True:
        ports = range(first := free_port(), first + count)
        if ports[-1] < 65_536 and all(map(is_free, ports)):
            return ports


def is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
