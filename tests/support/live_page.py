"""A live page that a test serves from a thread, and sources whose content the test writes."""

import http.client
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pseudoreal_trainer.report.job import Job
from pseudoreal_trainer.ui.access import new_token
from pseudoreal_trainer.ui.server import LiveServer
from pseudoreal_trainer.ui.view import Feed, JobView, Labels, Listing, Row, Source

T = TypeVar("T")


@dataclass(frozen=True)
class Live:
    """A server on loopback."""

    port: int
    token: str

    @property
    def url(self) -> str:
        """Address as the command prints it."""
        return f"http://127.0.0.1:{self.port}/?token={self.token}"

    def at(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    @property
    def cookie(self) -> dict[str, str]:
        return {"Cookie": f"pseudoreal-ui-{self.port}={self.token}"}

    def ask(self, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
        """Return the response, with its body unread. `headers`: with underscores in place of hyphens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.putrequest(method, path, skip_host="Host" in named)
        for name, value in named.items():
            connection.putheader(name, value)
        connection.endheaders()
        return connection.getresponse()


@contextmanager
def served(source: Source, send_bytes: int | None = None) -> Iterator[Live]:
    """Serve the source. `send_bytes`: what the system holds of an answer that nobody takes; None: as usual."""
    token = new_token()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if send_bytes is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
        server = LiveServer(source, listener, token)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        try:
            yield Live(listener.getsockname()[1], token)
        finally:
            server.stop()
            thread.join(30)
    assert not thread.is_alive()


@dataclass
class Written(Generic[T]):
    """Feed with the content that a test writes. `read`: in place of the content, what a read does."""

    content: T
    in_place: Callable[[], T | None] | None = None
    _woken: threading.Event = field(default_factory=threading.Event)
    is_closed: bool = False

    def write(self, content: T) -> None:
        self.content = content
        self._woken.set()

    def read(self) -> T | None:
        return self.in_place() if self.in_place else self.content

    def wait(self) -> None:
        if not self.is_closed:
            self._woken.wait(0.2)
            self._woken.clear()

    def close(self) -> None:
        self.is_closed = True
        self._woken.set()


@dataclass
class WrittenSource:
    """Source of a list and of jobs by their ids."""

    rows: Written[Listing]
    jobs: dict[str, Feed[JobView]] = field(default_factory=dict)
    labels: Labels = field(default=Labels("Jobs of a test", "Namespace", "Created (UTC)", "Written by a test."))

    def listing(self) -> Feed[Listing]:
        return self.rows

    def job(self, id: str) -> Feed[JobView] | None:
        return self.jobs.get(id)


def rows_of(count: int, state: str = "Training") -> list[Row]:
    return [
        Row(
            f"team/job-{number}",
            f"job-{number}",
            "team",
            state,
            "real",
            f"{number} of 1,000",
            "3.25",
            "0",
            "2026-11-26",
        )
        for number in range(count)
    ]


def source_of(rows: Sequence[Row] = (), jobs: Mapping[str, Feed[JobView]] | None = None) -> WrittenSource:
    return WrittenSource(Written(Listing([*rows])), {**(jobs or {})})


def view_of(job: Job, **fields: object) -> JobView:
    known = {"name": job.name, "place": "namespace team", "state": "Training", "job": job}
    return JobView(**(known | fields))  # type: ignore[arg-type]
