"""Listening sockets of servers."""

import socket

_BACKLOG = 256


def listening_socket(port: int) -> socket.socket:
    """Return a listening socket for IPv6 and IPv4, or for IPv4 alone if the machine has no dual stack. `port` 0: a free
    port."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)
