"""Addresses of this machine."""

import socket


def free_port() -> int:
    """On the loopback interface."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
