"""Listening sockets of servers."""

import socket

_BACKLOG = 256


def listening_socket(port: int) -> socket.socket:
    """Return a socket of both address families, if the machine has both; at a free port if `port` is 0."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)
