"""The server: who may ask, what each answer carries, and its bounds. Over real connections."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.ui import channels as channels_module
from pseudoreal_trainer.ui import server as server_module
from pseudoreal_trainer.ui.access import Guard
from pseudoreal_trainer.ui.folders import LocalRuns
from pseudoreal_trainer.ui.view import Listing

from tests.support.live_page import Live, Written, rows_of, served, source_of, view_of
from tests.support.patience import wait_for
from tests.unit.trainer.report.support.jobs import job, line, write_folder

SAFE = {
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    shown = Written(view_of(job([line(1), line(2)])))
    with served(source_of(rows_of(3), {"team/job-1": shown})) as live:
        yield live


PATHS = ["/", "/job/team/job-1", "/events/list", "/events/job/team/job-1", "/assets/page.js", "/nothing"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("given", ["", "x", "é", "0" * 43, "0" * 100_000])
def test_no_path_answers_without_the_token(live: Live, path: str, given: str) -> None:
    cookie = {"Cookie": f"pseudoreal-ui-{live.port}={given}"} if len(given) < 1000 and given.isascii() else {}
    for address in (path, f"{path}?token={given[:1000].encode().decode('latin-1') if given.isascii() else 'x'}"):
        answer = live.ask(address, **cookie)
        assert answer.status == 403
        assert "job-1" not in answer.read().decode()


def test_the_token_opens_the_list_once_and_then_stays_out_of_the_address(live: Live) -> None:
    entrance = live.ask(f"/?token={live.token}")
    assert (entrance.status, entrance.headers["location"]) == (303, "/")
    cookie = entrance.headers["set-cookie"]
    assert cookie == f"pseudoreal-ui-{live.port}={live.token}; HttpOnly; Path=/; SameSite=strict"
    assert "job-1" in live.ask("/", Cookie=cookie.partition(";")[0]).read().decode()
    # The token in an address opens nothing but the entrance, and no other token does.
    assert live.ask(f"/job/team/job-1?token={live.token}").status == 403
    assert live.ask(f"/?token={live.token}&token={live.token}").status == 403
    assert live.ask(f"/?token={live.token[:-1]}").status == 403


@pytest.mark.parametrize("path", PATHS)
def test_address_with_many_fields_is_refused_like_any_other(live: Live, path: str) -> None:
    for fields in ("&a=1" * 30, "&" * 30, f"&token={live.token}" * 30):
        answer = live.ask(f"{path}?token={live.token}{fields}")
        assert (answer.status, "The token is missing or wrong" in answer.read().decode()) == (403, True)
    assert live.ask("/?" + "a=1&" * 30, **live.cookie).status == 200


def test_the_token_of_another_program_is_none(live: Live) -> None:
    with served(source_of(rows_of(1))) as other:
        assert other.token != live.token
        assert other.ask("/", Cookie=f"pseudoreal-ui-{other.port}={live.token}").status == 403


@pytest.mark.parametrize("path", ["/", "/?token=", "/assets/page.js", "/events/list"])
@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "127.0.0.1:80@evil.example", "", "0.0.0.0", "[::1]"],
)
def test_a_name_that_only_leads_here_is_refused(live: Live, path: str, host: str) -> None:
    address = path + (live.token if path.endswith("=") else "")
    assert live.ask(address, Host=host, **live.cookie).status == 421


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9999", "LOCALHOST"])
def test_the_machine_by_its_own_name_is_answered_also_through_a_tunnel(live: Live, host: str) -> None:
    assert live.ask("/", Host=host, **live.cookie).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT"])
def test_nothing_but_reading_is_answered(live: Live, method: str) -> None:
    for path in ("/", "/job/team/job-1"):
        answer = live.ask(path, method, Origin="http://evil.example", **live.cookie)
        assert answer.status == 405 if method != "CONNECT" else answer.status >= 400


@pytest.mark.parametrize("path", [*PATHS, "/?token=wrong"])
def test_every_answer_has_the_headers_of_security_and_none_for_other_origins(live: Live, path: str) -> None:
    for headers in (live.cookie, {}):
        answer = live.ask(path, Origin="http://evil.example", **headers)
        found = {name.lower(): value for name, value in answer.headers.items()}
        assert SAFE.items() <= found.items()
        policy = dict(part.split(maxsplit=1) for part in found["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert not any(name.startswith("access-control") for name in found)
        assert "server" not in found


def test_the_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `secrets.compare_digest` alone: a comparison that is replaced decides."""
    monkeypatch.setattr("pseudoreal_trainer.ui.access.secrets.compare_digest", lambda *_: True)
    with served(source_of()) as live:
        assert live.ask("/?token=x").status == 303
        assert live.ask("/", Cookie=f"pseudoreal-ui-{live.port}=x").status == 200


def test_the_port_is_that_of_loopback_alone(live: Live) -> None:
    own = [
        str(address)
        for *_, (address, *_) in socket.getaddrinfo(socket.gethostname(), live.port, type=socket.SOCK_STREAM)
        if not str(address).startswith("127.") and address != "::1"
    ]
    for address in own:
        with pytest.raises(OSError, match=r"refused|unreachable"):
            socket.create_connection((address, live.port), timeout=5)


def test_an_unknown_job_and_an_unknown_file_are_said_so(live: Live) -> None:
    for path in (
        "/job/team/nothing",
        "/job/..%2f..%2fetc",
        "/events/job/x",
        "/assets/..%2fpage.js",
        "/assets/page.html.j2",
    ):
        answer = live.ask(path, **live.cookie)
        assert answer.status == 404, path
        assert "There is no such page" in answer.read().decode()


# Streams


def events(live: Live, path: str, have: str = "") -> "Events":
    return Events(live.ask(f"{path}?have={have}", **live.cookie))


class Events:
    """Events of a stream, with their data."""

    def __init__(self, answer: Any) -> None:
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        self._answer = answer

    def __iter__(self) -> "Events":
        return self

    def __next__(self) -> tuple[str, Any]:
        kind = ""
        while True:
            text = self._answer.readline().decode().rstrip("\n")
            if text.startswith("event: "):
                kind = text[7:]
            elif text.startswith("data: "):
                return kind, json.loads(text[6:]) if kind == "change" else text[6:]

    def close(self) -> None:
        self._answer.close()


def test_a_stream_sends_everything_once_and_then_what_has_changed() -> None:
    rows = rows_of(3)
    source = source_of(rows)
    with served(source) as live:
        stream = events(live, "/events/list")
        kind, first = next(stream)
        assert kind == "change"
        assert [*first["parts"]] == ["row/team/job-0", "row/team/job-1", "row/team/job-2", "notices"]
        changed = [rows[0], *rows_of(3, "Failed")[1:2], rows[2]]
        source.rows.write(Listing(changed))
        kind, second = next(stream)
        assert [*second["parts"]] == ["row/team/job-1"]
        assert "order" not in second
        source.rows.write(Listing(changed[1:]))
        assert next(stream)[1]["order"] == ["row/team/job-1", "row/team/job-2"]
        # A page that has the newest content gets the next change alone.
        again = events(live, "/events/list", second["digest"])
        newest = next(again)[1]
        assert newest["order"] == ["row/team/job-1", "row/team/job-2"]
        third = events(live, "/events/list", newest["digest"])
        source.rows.write(Listing(changed[2:]))
        assert [*next(third)[1]["parts"]] == []
        for each in (stream, again, third):
            each.close()


def test_a_read_that_hangs_stops_neither_other_pages_nor_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels_module, "HANGING_SECONDS", 0.3)
    monkeypatch.setattr(server_module, "_FIRST_SECONDS", 0.5)
    released, hangs = threading.Event(), threading.Event()

    def read() -> Any:
        if hangs.is_set():
            released.wait()
        return view_of(job([line(1)]))

    def wait() -> None:
        released.wait()

    known = Written(view_of(job([line(1)])), in_place=read)
    unknown = Written(view_of(job([line(1)])), in_place=wait)
    with served(source_of(rows_of(2), {"known": known, "unknown": unknown})) as live:
        stream = events(live, "/events/job/known")
        assert next(stream)[0] == "change"
        hangs.set()
        kind, sentence = next(stream)
        assert (kind, "There has been no answer" in sentence) == ("silent", True)
        assert live.ask("/job/known", **live.cookie).status == 200, "the state before"
        refused = live.ask("/job/unknown", **live.cookie)
        assert refused.status == 503
        assert "There has been no answer" in refused.read().decode()
        assert live.ask("/", **live.cookie).status == 200
        hangs.clear()
        released.set()
        while (event := next(stream))[0] == "silent":
            pass
        assert event[0] == "alive"
        hangs.clear()
        released.clear()
        # The server ends although a thread hangs.
        hangs.set()
    released.set()


def test_a_read_that_fails_is_said_and_the_content_stays() -> None:
    fails = threading.Event()

    def read() -> Listing:
        if fails.is_set():
            raise TrainingError("the storage is away; bring it back")
        return Listing(rows_of(1))

    source = source_of()
    source.rows.in_place = read
    with served(source) as live:
        stream = events(live, "/events/list")
        assert next(stream)[0] == "change"
        fails.set()
        assert next(stream) == ("silent", "the storage is away; bring it back")
        assert "job-0" in live.ask("/", **live.cookie).read().decode()
        fails.clear()
        assert next(stream)[0] == "alive"


def test_a_defect_in_one_page_is_said_and_leaves_the_others() -> None:
    def read() -> Any:
        raise ZeroDivisionError("x")

    broken = Written(view_of(job([line(1)])), in_place=read)
    with served(source_of(rows_of(1), {"broken": broken})) as live:
        answer = live.ask("/job/broken", **live.cookie)
        assert answer.status == 503
        assert "The page cannot be made (ZeroDivisionError)" in answer.read().decode()
        assert live.ask("/", **live.cookie).status == 200


def test_a_browser_that_takes_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """More is sent than the system holds for a connection. The stream ends, and its place is free again."""
    monkeypatch.setattr(server_module, "SEND_SECONDS", 0.5)
    monkeypatch.setattr(server_module, "_LEAST_SECONDS", 0.01)
    number = iter(range(10**9))
    source = source_of()
    source.rows.in_place = lambda: Listing([*rows_of(300, f"{next(number)}{'x' * 50}")])
    source.rows.wait = lambda: time.sleep(0.02)  # type: ignore[method-assign]
    cut: list[object] = []
    real = server_module._cut_off

    def cut_off(scope: Any) -> None:
        cut.append(scope)
        real(scope)

    monkeypatch.setattr(server_module, "_cut_off", cut_off)
    with served(source, 1 << 14) as live, socket.create_connection(("127.0.0.1", live.port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        request = f"GET /events/list HTTP/1.1\r\nHost: localhost\r\nCookie: {live.cookie['Cookie']}\r\n\r\n"
        slow.sendall(request.encode())
        wait_for("the stream is cut off", lambda: bool(cut))
        slow.settimeout(30)
        with suppress(ConnectionResetError):
            while slow.recv(1 << 16):
                pass
        assert live.ask("/", **live.cookie).status == 200


def test_no_more_streams_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MOST_STREAMS", 3)
    with served(source_of(rows_of(1))) as live:
        streams = [events(live, "/events/list") for _ in range(3)]
        refused = live.ask("/events/list", **live.cookie)
        assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        streams[0].close()
        wait_for("a place is free", lambda: live.ask("/events/list", **live.cookie).status == 200)


def test_no_more_jobs_are_followed_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that nobody looks at make room; while all are looked at, one more is refused."""
    monkeypatch.setattr(channels_module.Channels.__init__, "__defaults__", (4,))
    jobs = {f"job{number}": Written(view_of(job([line(1)]))) for number in range(6)}
    with served(source_of(rows_of(1), jobs)) as live:
        for name in jobs:
            assert live.ask(f"/job/{name}", **live.cookie).status == 200
        assert sum(each.is_closed for each in jobs.values()) >= 2
        streams = [events(live, f"/events/job/{name}") for name in [*jobs][:4]]
        for stream in streams:
            next(stream)
        assert live.ask("/job/job5", **live.cookie).status == 503
        assert live.ask("/job/job1", **live.cookie).status == 200
        for stream in streams:
            stream.close()


def test_a_job_that_nobody_looks_at_is_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels_module, "IDLE_SECONDS", 0.1)
    one = Written(view_of(job([line(1)])))
    with served(source_of(rows_of(1), {"one": one})) as live:
        stream = events(live, "/events/job/one")
        next(stream)
        time.sleep(0.3)
        live.ask("/", **live.cookie)
        assert not one.is_closed, "somebody looks at it"
        stream.close()
        wait_for("it is closed", lambda: live.ask("/", **live.cookie) and one.is_closed)


def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_REQUEST_SECONDS", 0.3)
    with served(source_of()) as live, socket.create_connection(("127.0.0.1", live.port), timeout=30) as silent:
        silent.sendall(b"GET / HT")
        assert silent.recv(1) == b""


def test_a_request_that_is_too_long_is_refused(live: Live) -> None:
    answer = live.ask("/", X_Long="x" * 1_000_000, **live.cookie)
    assert answer.status >= 400


def test_websockets_are_refused() -> None:
    async def app(*_: Any) -> None:
        raise AssertionError("not reached")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(Guard(app, "x", 1)({"type": "websocket"}, app, send))  # type: ignore[arg-type]
    assert sent == []


# With a folder


def test_a_page_that_was_open_before_the_program_started_finds_its_job(tmp_path: Path) -> None:
    write_folder(tmp_path / "run", [line(1)])
    with served(LocalRuns(tmp_path)) as live:
        text = live.ask("/", **live.cookie).read().decode()
        path = text.partition('href="/job/')[2].partition('"')[0]
    with served(LocalRuns(tmp_path)) as live:
        assert live.ask(f"/job/{path}", **live.cookie).status == 200
