"""An API server on loopback that answers each request as the test says."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

Json = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """An answer. `lines` are sent one by one; `silent`: the connection stays open after them until the test ends;
    `cut`: it is cut off after them, in the middle of the answer."""

    status: int = 200
    lines: tuple[str, ...] = ()
    silent: bool = False
    cut: bool = False


@dataclass
class ScriptedServer:
    """Answers to requests whose path contains a key, in their order; the last one stays."""

    url: str = ""
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    """Part of the path and query -> answers."""
    asked: list[Json] = field(default_factory=list)
    """Query of each request, with its path."""
    over: threading.Event = field(default_factory=threading.Event)

    def answer(self, path: str) -> Answer:
        url = urlsplit(path)
        self.asked.append({key: value for key, (value,) in parse_qs(url.query).items()} | {"path": url.path})
        key = next(key for key in self.answers if key in path)
        found = self.answers[key]
        return found.pop(0) if len(found) > 1 else found[0]

    def kubeconfig(self, path: Path) -> str:
        """Write a kubeconfig of this server, with the namespace team; return its path."""
        body = {
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {}}],
        }
        path.write_text(yaml.safe_dump(body))
        return str(path)

    def watches(self) -> list[str]:
        """Return the resourceVersion of each watch that was asked for."""
        return [query["resourceVersion"] for query in self.asked if "watch" in query]


def one(body: Any, status: int = 200) -> Answer:
    return Answer(status, (json.dumps(body),))


def watch(*events: tuple[str, Json], silent: bool = False, cut: bool = False) -> Answer:
    return Answer(200, tuple(json.dumps({"type": kind, "object": body}) for kind, body in events), silent, cut)


def failure(code: int, reason: str = "", message: str = "") -> Json:
    return {"kind": "Status", "code": code, "reason": reason, "message": message}


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    script = ScriptedServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(lambda path: script.answer(path), script.over))
    script.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield script
    finally:
        script.over.set()
        server.shutdown()
        server.server_close()


def _handler(answer_of: Callable[[str], Answer], over: threading.Event) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer = answer_of(self.path)
            self.send_response(answer.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for line in answer.lines:
                data = f"{line}\n".encode()
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                self.wfile.flush()
            if answer.silent:
                over.wait()
            if answer.cut or answer.silent:
                self.close_connection = True
                return
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_: object) -> None: ...

    return Handler
