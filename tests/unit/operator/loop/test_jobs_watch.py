"""Use of kopf: its settings, the data that it may receive, and that its end ends nothing else."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sized
from typing import Any, cast
from unittest.mock import Mock

import kopf
import pytest
from kopf._cogs.structs import references
from pseudoreal_operator.cluster import kopf_session
from pseudoreal_operator.cluster.kopf_session import Contact
from pseudoreal_operator.loop import jobs_watch
from pseudoreal_operator.loop.jobs_watch import JobsWatch, find_stall, kopf_settings, register_handler
from pseudoreal_operator.loop.loop import Loop
from pseudoreal_operator.settings import Settings

SETTINGS = Settings("trainer:1", "IfNotPresent", ())


def test_kopf_settings_disable_events_scanning_and_process_exit() -> None:
    settings = kopf_settings()
    assert settings.posting.enabled is False
    assert settings.scanning.disabled is True
    assert settings.peering.standalone is True
    # They become query parameters, and the API server takes integers only.
    assert isinstance(settings.watching.server_timeout, int)
    assert settings.process.ultimate_exiting_timeout is None


def test_kopf_retries_for_as_long_as_the_api_server_is_away() -> None:
    backoffs = kopf_settings().networking.error_backoffs
    assert not isinstance(backoffs, float | int | Sized), "kopf ends after the last one of what has a length"
    for _ in range(2):
        waits = [*itertools.islice(backoffs, 1000)]
        assert sum(waits) > 1800
        assert max(waits) <= 9, "it notices soon that the API server is back"


async def test_kopf_handler_needs_no_finalizer() -> None:
    """With a finalizer kopf would write to every job."""
    registry = kopf.OperatorRegistry()
    register_handler(registry, cast(Loop, None), asyncio.get_running_loop())
    jobs = references.Resource("pseudoreal.dev", "v1alpha1", "pseudorealjobs")
    assert registry._watching.has_handlers(resource=jobs)
    assert not registry._spawning.has_handlers(resource=jobs)
    assert not registry._changing.has_handlers(resource=jobs)


def _encode(value: Any) -> bytes:
    """Return the value as the API server encodes it."""
    return json.dumps(value, separators=(",", ":")).encode()


class Lines:
    """Lines that a watch of jobs sends, and the changes that kopf receives."""

    def __init__(self, *changes: Any) -> None:
        self.sent = [one if isinstance(one, bytes) else _encode(one) for one in changes]
        self.unreadable: list[tuple[str, str]] = []
        self.contact = Contact(lambda: None, lambda *name: self.unreadable.append(name))

    async def iter_any(self) -> AsyncIterator[bytes]:
        for line in self.sent:
            yield line + b"\n"

    async def receive(self) -> list[Any]:
        changes = kopf_session._JobChanges(cast(Any, self), self.contact)
        return [json.loads(line) async for line in changes.iter_chunked(1024)]


def make_change(name: str, **fields: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "n", "uid": "u", "resourceVersion": "7", "annotations": {"a": "x" * 300}}
    return {"type": "MODIFIED", "object": {"metadata": metadata} | fields}


DEEP = b'{"type":"ADDED","object":{"metadata":{"name":"deep","namespace":"mallory"},"spec":' + b"[" * 3000 + b"]" * 3000


async def test_kopf_receives_only_used_fields_and_no_job_beyond_the_bounds() -> None:
    spec = {"model": {"layers": 8}, "cleanUp": {"children": "Delete"}, "deadlines": {"ttlSecondsAfterFinished": 5}}
    status = {"state": "Complete"}
    large = make_change("large", status={"conditions": [{"message": "x" * 300_000}]})
    lines = Lines(make_change("a", spec=spec, status=status), DEEP + b"}}", large, make_change("b"))
    first, last = await lines.receive()
    assert first["object"] == {
        "apiVersion": None,
        "kind": None,
        "metadata": {"name": "a", "namespace": "n", "uid": "u", "resourceVersion": "7"},
        "spec": {"cleanUp": {"children": "Delete"}, "deadlines": {"ttlSecondsAfterFinished": 5}},
        "status": status,
    }
    assert last["object"]["metadata"]["name"] == "b"
    assert lines.unreadable == [("mallory", "deep"), ("n", "large")]


async def test_no_name_from_a_users_text_is_taken_for_a_job() -> None:
    forged = {"managedFields": "a", "name": "theirs", "namespace": "alice", "pad": "," * 110_000}
    metadata = {"annotations": forged, "managedFields": [], "name": "mine", "namespace": "mallory", "uid": "u"}
    lines = Lines({"type": "MODIFIED", "object": {"metadata": metadata, "spec": {}}})
    assert await lines.receive() == []
    assert lines.unreadable == [("mallory", "mine")]


async def test_watch_error_ends_the_connection_and_not_kopf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kopf_session, "_MOST_PAUSE_SECONDS", 0.0)
    for error in ({"code": 500}, {"code": 504}, {}, "nonsense"):
        told = await Lines(make_change("a"), {"type": "ERROR", "object": error}, make_change("b")).receive()
        assert [one["object"]["metadata"]["name"] for one in told] == ["a"], error
    # This one has kopf list anew.
    told = await Lines({"type": "ERROR", "object": {"code": 410}}).receive()
    assert told == [{"type": "ERROR", "object": {"code": 410}}]


@pytest.mark.parametrize("error", [RuntimeError, RecursionError, MemoryError, SystemExit, asyncio.CancelledError])
async def test_kopf_is_restarted_whatever_ends_it(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    starts, third = list[int](), asyncio.Event()
    own = asyncio.get_running_loop()

    async def operator() -> None:
        starts.append(1)
        if len(starts) < 3:
            raise error
        own.call_soon_threadsafe(third.set)
        await asyncio.sleep(1000)

    monkeypatch.setattr(jobs_watch, "_operator", lambda *_: operator)
    monkeypatch.setattr(jobs_watch, "_MOST_PAUSE_SECONDS", 0.01)
    loop = Mock(spec=Loop)
    watch = JobsWatch(loop, SETTINGS)
    running = asyncio.create_task(watch.run())
    async with asyncio.timeout(30):
        await third.wait()
    assert not running.done()
    assert loop.jobs_unwatched.call_count == 2, "the memory of jobs is not used until the next run has listed"
    running.cancel()
    await asyncio.wait([running], timeout=5)
    assert running.cancelled()


def test_silent_kopf_counts_as_stalled() -> None:
    contact = Contact(lambda: None, lambda *_: None, last=100.0)
    assert find_stall(contact, 105.0) is None
    assert "has not begun to watch" in str(find_stall(contact, 120.0)), "it never looks for a kind again"
    contact.pending_requests = 1
    assert find_stall(contact, 120.0) is None, "it waits for an answer"
    contact.pending_requests, contact.has_requested_jobs = 0, True
    assert find_stall(contact, 120.0) is None
    assert "heard nothing for 200 s" in str(find_stall(contact, 300.0))
