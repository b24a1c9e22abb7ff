"""A fake node. Its kubelet serves logs to the API server but runs nothing."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kubernetes import client
from pseudoreal_dev.cluster.certificates import Authority


@dataclass
class Kubelet:
    """Log lines by pod name. A followed log does not end before `open` is set."""

    node: str
    logs: dict[str, list[str]] = field(default_factory=dict)
    open: threading.Event = field(default_factory=threading.Event)
    """Event for ending followed logs."""
    followed: set[str] = field(default_factory=set)

    def lines(self, pod: str, query: dict[str, list[str]]) -> Iterator[bytes]:
        said = self.logs[pod]
        if "tailLines" in query:
            said = said[len(said) - int(query["tailLines"][0]) :]
        yield from (f"{line}\n".encode() for line in said)
        if "follow" in query:
            self.followed.add(pod)
            self.open.wait()
            yield b"the end"


@contextmanager
def kubelet(api: client.ApiClient, node: str, folder: Path) -> Iterator[Kubelet]:
    """Create a node and serve its kubelet."""
    made = Kubelet(node)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(made))
    pair = Authority(folder).issue("kubelet", hosts=["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    core = client.CoreV1Api(api)
    _make_node(core, node, server.server_address[1])
    try:
        yield made
    finally:
        made.open.set()
        server.shutdown()
        core.delete_node(node)


def _make_node(core: client.CoreV1Api, name: str, port: int) -> None:
    node: Any = {"metadata": {"name": name}}
    core.create_node(node)
    status = {
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
    }
    core.patch_node_status(name, {"status": status})


def _handler(told: Kubelet) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            pod = url.path.split("/")[3]
            if pod not in told.logs:
                self.send_error(500, "the container is gone")
                return
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for line in told.lines(pod, parse_qs(url.query)):
                self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_: object) -> None:
            pass

    return Handler
