"""A report endpoint like the operator's, on loopback, that misbehaves on demand."""

import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pseudoreal_api.names import LABEL_JOB
from pseudoreal_api.wire.reports import REPORT_AUTHORITIES, REPORT_PATH, Membership, PodReport, ReportAnswer
from pseudoreal_trainer.runtime.reports import Endpoint

_LOOPBACK = "127.0.0.1"


class Server:
    """HTTPS server that keeps the newest report of each pod, by token; `changed` guards its state."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, 0
        self.authority = folder / "ca.crt"
        _write_certificate(folder / "server.pem", self.authority)
        self.manner = "answers"
        """How the server answers: "answers", "hangs", "garbage", "no http", or a status such as "500"."""
        self.finishes: set[str] = set()
        """Tokens of the pods that the answers ask to finish their phase."""
        self.membership: Membership | None = None
        self.authorities: str | None = None
        """CA certificates (PEM) that the answers tell pods to trust."""
        self.trusted: list[str] = []
        """Digests of the CA certificates that pods said they trust."""
        self.newest: dict[str, PodReport] = {}
        self.seen: Counter[str] = Counter()
        """Manner -> number of requests handled in that manner."""
        self.connections = 0
        """Number of TLS handshakes started."""
        self.changed = threading.Condition()
        self._released = threading.Event()

    @property
    def url(self) -> str:
        return f"https://{_LOOPBACK}:{self._port}{REPORT_PATH}"

    def endpoint(self, token: str) -> Endpoint:
        path = self._folder / f"token-{token}"
        path.write_text(token + "\n")
        return Endpoint(self.url, path, self.authority)

    def start(self) -> None:
        """Start serving; after a stop, on the same port again."""
        self._released.clear()
        server = self

        class Handler(_Handler):
            endpoint = server

        self._http = _Listener((_LOOPBACK, self._port), Handler)
        self._http.server = self
        self._http.context.load_cert_chain(self._folder / "server.pem")
        self._port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def restarts_in_place(self) -> int:
        return max((report.in_place.restarts for report in self.newest.values() if report.in_place), default=0)

    def stop(self) -> None:
        self._released.set()
        self._http.shutdown()
        self._http.server_close()
        for connection in self._http.open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def hang(self) -> None:
        self._released.wait()

    def note(self, what: str, token: str = "", report: PodReport | None = None) -> None:
        with self.changed:
            self.seen[what] += 1
            if report is not None:
                self.newest[token] = report
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[], object], seconds: float = 300.0) -> None:
        deadline = time.monotonic() + seconds
        with self.changed:
            while not condition():
                assert time.monotonic() < deadline, (self.seen, self.newest)
                self.changed.wait(0.05)


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    server: Server

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.open: set[Any] = set()

    def finish_request(self, request: Any, client_address: Any) -> None:
        # In the connection's own thread, so that a client that stalls its handshake delays no other client.
        self.server.connections += 1
        with self.context.wrap_socket(request, server_side=True) as wrapped:
            self.open.add(wrapped)
            super().finish_request(wrapped, client_address)

    def handle_error(self, *_: Any) -> None:
        """Clients that go away are part of the tests, so nothing is printed."""


class _Handler(BaseHTTPRequestHandler):
    endpoint: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        token = self.headers["Authorization"].removeprefix("Bearer ")
        manner = self.endpoint.manner
        report = PodReport.model_validate_json(content) if self.path == REPORT_PATH else None
        if manner == "hangs":
            self.endpoint.note(manner)
            self.endpoint.hang()
            return
        if manner == "answers":
            answer = ReportAnswer(
                finish_phase=token in self.endpoint.finishes,
                restarts_in_place=self.endpoint.restarts_in_place(),
                membership=self.endpoint.membership,
                authorities=self.endpoint.authorities,
            )
            self.endpoint.trusted.append(self.headers[REPORT_AUTHORITIES])
            self._say(200, answer.to_json())
        elif manner == "garbage":
            self._say(200, "<html>not an answer</html>")
        elif manner == "no http":
            self.wfile.write(b"\x00\xff" * 100)
            self.close_connection = True
        else:
            self._say(int(manner), "no")
        self.endpoint.note(manner, token, report)

    def _say(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        if status == 429:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Keep requests out of the terminal."""


def _write_certificate(server: Path, authority: Path) -> None:
    """Write a self-signed certificate that is valid for loopback."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, LABEL_JOB)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(_LOOPBACK))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    public = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    authority.write_bytes(public)
    server.write_bytes(private + public)
