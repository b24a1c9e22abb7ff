"""Many disk requests at a time, and their endings."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pseudoreal_trainer.engine.state.direct_file import (
    DEPTH,
    REQUEST_BYTES,
    DirectFile,
    DiskError,
    Requests,
    aligned_buffer,
)

PATIENCE = 60
"""Seconds after which an event that never comes counts as missing."""
LARGE = 3 * DEPTH * REQUEST_BYTES


@pytest.fixture
def file(tmp_path: Path) -> Any:
    made = DirectFile(tmp_path, LARGE)
    yield made
    made.close()


def _meeting(call: Callable[..., int], meeting: threading.Barrier, sizes: list[int]) -> Callable[..., int]:
    """Return the call, delayed until as many calls as the barrier asks for are in flight."""

    def meet(*arguments: Any) -> int:
        meeting.wait(PATIENCE)
        done = call(*arguments)
        sizes.append(done)
        return done

    return meet


@pytest.mark.parametrize("name", ["preadv", "pwrite"])
def test_a_large_read_keeps_all_requests_in_flight(
    name: str, file: DirectFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request ends before sixteen are in flight; with fewer at a time, none would ever end."""
    sizes: list[int] = []
    monkeypatch.setattr(os, name, _meeting(getattr(os, name), threading.Barrier(DEPTH), sizes))
    act = file.read if name == "preadv" else file.write
    act([(0, aligned_buffer(LARGE))])
    assert DEPTH >= 16
    assert sizes == [REQUEST_BYTES] * (LARGE // REQUEST_BYTES), "and every byte once"


def test_vectors_of_a_chunk_are_read_concurrently(file: DirectFile, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = 4
    monkeypatch.setattr(os, "preadv", _meeting(os.preadv, threading.Barrier(vectors), []))
    file.read([(place * REQUEST_BYTES, aligned_buffer(REQUEST_BYTES)) for place in range(vectors)])


def test_direct_file_reads_what_it_wrote_in_many_requests(file: DirectFile) -> None:
    written, found = aligned_buffer(LARGE), aligned_buffer(LARGE)
    written.copy_(torch.randint(0, 256, (LARGE,), dtype=torch.uint8))
    file.write([(0, written)])
    file.read([(0, found)])
    assert torch.equal(found, written)


@pytest.mark.parametrize("failing", [0, 1, DEPTH - 1, DEPTH, 3 * DEPTH - 1])
@pytest.mark.parametrize("name", ["preadv", "pwrite"])
def test_a_failed_request_is_raised_when_no_request_is_in_flight(
    name: str, failing: int, file: DirectFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, under_way, lock = getattr(os, name), [0], threading.Lock()

    def fail(number: int, views: Any, at: int) -> int:
        with lock:
            under_way[0] += 1
        try:
            if at == failing * REQUEST_BYTES:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return int(call(number, views, at))
        finally:
            with lock:
                under_way[0] -= 1

    monkeypatch.setattr(os, name, fail)
    act = file.read if name == "preadv" else file.write
    with pytest.raises(DiskError, match="Input/output error"):
        act([(0, aligned_buffer(LARGE))])
    assert under_way == [0], "who gets the buffer next is alone with it"


def test_slow_requests_are_awaited_after_a_failure() -> None:
    requests, begun, failed, ended = Requests(), threading.Event(), threading.Event(), []

    def fail() -> None:
        assert begun.wait(PATIENCE)
        failed.set()
        raise OSError(errno.EIO, "the disk is gone")

    def slow() -> None:
        begun.set()
        assert failed.wait(PATIENCE)
        for _ in range(1000):
            os.sched_yield()  # whoever does not wait for this one is far ahead by now
        ended.append(1)

    with pytest.raises(OSError, match="the disk is gone"):
        requests.run([fail, slow])
    assert ended == [1]
    requests.close()


def test_requests_work_after_an_earlier_failure() -> None:
    requests, done = Requests(), []

    def fail() -> None:
        raise OSError(errno.EIO, "the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        requests.run([fail] * 3 * DEPTH)
    requests.run([lambda: done.append(1)] * 3 * DEPTH)
    assert len(done) == 3 * DEPTH
    requests.close()
