"""`/metrics` of a pod, in a thread of the process that looks after its ranks: training does not notice who reads it."""

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer

import structlog
from pseudoreal_api.wire.reports import METRICS_PORT

from pseudoreal_trainer.pod.exposition import CONTENT_TYPE, exposition
from pseudoreal_trainer.pod.heartbeats import pod_report
from pseudoreal_trainer.pod.pod_folder import PodFolder

PATH = "/metrics"
_CLIENT_SECONDS = 2.0
"""Seconds for which a client may say nothing: there is one at a time."""
_LAST_SECONDS = 1.0
"""Seconds that the end of a pod waits for a client."""
_POLL_SECONDS = 0.1

log = structlog.get_logger()


def metrics_port(environment: Mapping[str, str]) -> int | None:
    """The port that the environment names; None where nobody asks for metrics."""
    text = environment.get(METRICS_PORT)
    return int(text) if text else None


@contextmanager
def serving_metrics(folder: PodFolder, port: int | None) -> Iterator[int | None]:
    """A context in which the pod serves /metrics: the port; a free one where 0 was asked for; None where there is no
    such thing. A port that is taken costs the metrics, not the training."""
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
        # It waits for the client of the moment, for which the pod does not.
        threading.Thread(target=server.shutdown, daemon=True).start()
        thread.join(_LAST_SECONDS)
        server.server_close()


class _Server(TCPServer):
    """A server of both address families, where the machine has both."""

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
        """A client that breaks off is no news."""


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
        """A line for each request is noise."""
