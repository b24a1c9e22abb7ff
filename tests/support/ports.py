"""Addresses of this machine."""

import socket


def free_port() -> int:
    """On the loopback interface."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def free_ports(count: int) -> range:
    """Ports of the loopback interface, one behind the other."""
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
