"""A web server in a thread that sends files in parts, and fails as it is told."""

import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar, TypeVar

from pseudoreal_dev.cluster.certificates import KeyPair


@dataclass
class Answer:
    status: int = 200
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut_at: int | None = None
    """Number of bytes of the content after which the connection is closed."""


@dataclass
class FileServer:
    """Files by path, with what befalls their requests. A subclass answers other paths."""

    files: dict[str, bytes] = field(default_factory=dict)
    etags: dict[str, str] = field(default_factory=dict)
    faults: list[Answer] = field(default_factory=list)
    """Answers to the next requests for content, instead of the content."""
    has_ranges: bool = True
    requests: list[str] = field(default_factory=list)
    """Method, path and range of each request."""
    authorizations: set[str | None] = field(default_factory=set)
    """Values of the header that requests had."""
    url: str = ""

    def ranges(self, path: str) -> list[str]:
        """Return the ranges that were requested of a path."""
        found = (line.split() for line in self.requests)
        return [words[2] for words in found if words[0] == "GET" and words[1] == path and len(words) > 2]

    def answer(self, path: str, query: str, authorization: str | None) -> Answer | None:  # noqa: ARG002
        """Return the answer for a path that has no file; None: there is none."""
        return None

    def content(self, path: str) -> bytes | None:
        return self.files.get(path)

    def etag(self, path: str) -> str:
        return self.etags.get(path, f'"{hash(self.content(path)):x}"')

    def respond(self, path: str, query: str, wanted: str | None, authorization: str | None) -> Answer:
        if (found := self.answer(path, query, authorization)) is not None:
            return found
        content = self.content(path)
        if content is None:
            return Answer(404)
        if self.faults and wanted != "bytes=0-0":
            return self.faults.pop(0)
        headers = {"ETag": self.etag(path)}
        if not self.has_ranges or wanted is None:
            return Answer(200, content, headers)
        begin, end = (int(number) for number in re.findall(r"\d+", wanted))
        if begin >= len(content):
            return Answer(416, b"", headers | {"Content-Range": f"bytes */{len(content)}"})
        part = content[begin : end + 1]
        headers["Content-Range"] = f"bytes {begin}-{begin + len(part) - 1}/{len(content)}"
        return Answer(206, part, headers)


Served = TypeVar("Served", bound=FileServer)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: ClassVar[FileServer]

    def _respond(self) -> None:
        path, _, query = self.path.partition("?")
        wanted = self.headers.get("Range")
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.served.requests.append(f"{self.command} {path} {wanted or ''}".strip())
        self.served.authorizations.add(self.headers.get("Authorization"))
        answer = self.served.respond(path, query, wanted, self.headers.get("Authorization"))
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.content[: answer.cut_at])
        if answer.cut_at is not None:
            self.close_connection = True

    do_GET = do_HEAD = do_POST = _respond

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Print nothing: a client may leave before its answer."""


@contextmanager
def serving(served: Served, certificate: KeyPair | None = None) -> Iterator[Served]:
    handler = type("Handler", (_Handler,), {"served": served})
    server = _Server(("127.0.0.1", 0), handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.certificate, certificate.key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    scheme, host = ("https", "localhost") if certificate else ("http", "127.0.0.1")
    served.url = f"{scheme}://{host}:{server.server_port}"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
