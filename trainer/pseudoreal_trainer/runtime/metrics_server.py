"""Serves `/metrics` of a pod, in a thread of the supervisor process: scrapes do not disturb the ranks."""

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer

import structlog
from pseudoreal_api.wire.reports import METRICS_PORT

from pseudoreal_trainer.runtime.exposition import CONTENT_TYPE, exposition
from pseudoreal_trainer.runtime.heartbeats import pod_report
from pseudoreal_trainer.runtime.pod_folder import PodFolder

PATH = "/metrics"
_CLIENT_SECONDS = 2.0
"""Seconds of silence allowed to a client; the server handles one client at a time."""
_LAST_SECONDS = 1.0
"""Seconds of the pod's shutdown spent waiting for a client."""
_POLL_SECONDS = 0.1

log = structlog.get_logger()


def metrics_port(environment: Mapping[str, str]) -> int | None:
    """Return the port named by the environment; None if metrics are off."""
    text = environment.get(METRICS_PORT)
    return int(text) if text else None


@contextmanager
def serving_metrics(folder: PodFolder, port: int | None) -> Iterator[int | None]:
    """Serve /metrics inside the context; yield the port, or None if metrics are off or the port is taken.

    Port 0 asks for a free port. A taken port costs the metrics, not the training: a warning is logged.
    """
    if port is None:
        yield None
        return
    try:
        server = _Server(folder, port)
    except OSError as error:
        log.warning("metrics_not_served", port=port, error=str(error))
        yield None
        return
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), name="metrics", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        # shutdown() waits for the current client, without a limit; the pod waits `_LAST_SECONDS` at most.
        threading.Thread(target=server.shutdown, daemon=True).start()
        thread.join(_LAST_SECONDS)
        server.server_close()


class _Server(TCPServer):
    """Server for IPv6 and IPv4, if the machine has both, else for IPv4."""

    allow_reuse_address = True
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def __init__(self, folder: PodFolder, port: int) -> None:
        self.folder = folder
        super().__init__(("", port), _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def handle_error(self, *_: object) -> None:
        """Ignore aborted connections."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _CLIENT_SECONDS

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self.send_error(404)
            return
        body = exposition(pod_report(self.server.folder)).encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing: a line for each request would be noise."""
