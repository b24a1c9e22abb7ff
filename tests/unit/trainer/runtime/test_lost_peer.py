"""Errors by which a rank detects a lost peer, as raised by torch's own gloo and TCPStore."""

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pseudoreal_trainer.errors import PeerFailed, TrainingError
from pseudoreal_trainer.runtime.failures import has_lost_a_peer
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.support.ports import free_port
from tests.support.processes import Forked, preload, succeed

preload("tests.support.warm")

LARGE = 1 << 22
"""Number of elements; more than the buffers of a connection hold."""


def all_reduce() -> None:
    for _ in range(1000):
        dist.all_reduce(torch.ones(LARGE))


def receive() -> None:
    work = dist.irecv(torch.empty(LARGE), 1)
    assert work is not None
    work.wait()


def send() -> None:
    for _ in range(1000):
        work = dist.isend(torch.ones(LARGE), 1)
        assert work is not None
        work.wait()


def gather_in_a_thread() -> None:
    work = dist.all_gather([torch.empty(8), torch.empty(8)], torch.ones(8), async_op=True)
    assert work is not None
    work.wait()


def receive_what_never_comes() -> None:
    dist.irecv(torch.empty(8), 1, tag=1).wait(timedelta(seconds=1))  # type: ignore[union-attr]


DIES: list[Callable[[], None]] = [all_reduce, receive, send, gather_in_a_thread]
"""Calls during which the peer is killed."""
STAYS: list[Callable[[], None]] = [receive_what_never_comes]


def _rank(number: int, port: int, act: Callable[[], None], dies: bool, report: Path) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    store = TCPStore("127.0.0.1", port, 2, number == 0)
    dist.init_process_group("gloo", store=store, rank=number, world_size=2)
    dist.barrier()
    if number == 1:
        if dies:
            dist.all_reduce(torch.ones(LARGE))
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    if dies:
        dist.all_reduce(torch.ones(LARGE))
    try:
        act()
    except Exception as error:
        report.write_text(f"{has_lost_a_peer(error)} {type(error).__name__}: {error}")
    os._exit(0)


@pytest.mark.parametrize(
    ("act", "dies"),
    [pytest.param(act, dies, id=act.__name__) for acts, dies in ((DIES, True), (STAYS, False)) for act in acts],
)
def test_the_error_of_a_rank_with_a_dead_peer_is_recognized(
    act: Callable[[], None], dies: bool, tmp_path: Path
) -> None:
    report, port = tmp_path / "report", free_port()
    ranks = [Forked(_rank, number, port, act, dies, report) for number in (0, 1)]
    try:
        succeed(ranks[:1])
    finally:
        for rank in ranks:
            rank.kill()
    assert report.read_text().startswith("True "), report.read_text()


def test_the_error_of_a_store_without_a_server_is_a_lost_peer() -> None:
    with pytest.raises(dist.DistNetworkError) as caught:
        TCPStore("127.0.0.1", free_port(), 2, False, timeout=timedelta(seconds=1))
    assert has_lost_a_peer(caught.value)


def test_an_error_caused_by_a_lost_peer_is_a_lost_peer() -> None:
    wrapped = TrainingError("checkpoint real-7 could not be written")
    wrapped.__cause__ = RuntimeError("[/src/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer")
    assert has_lost_a_peer(wrapped)
    wrapped.__cause__ = PeerFailed()
    assert has_lost_a_peer(wrapped)


@pytest.mark.parametrize(
    "text",
    [
        "the disk is full",
        "mat1 and mat2 shapes cannot be multiplied",
        "NCCL error: unhandled cuda error",
        "[Errno 104] Connection reset by peer",
    ],
)
def test_other_errors_are_not_a_lost_peer(text: str) -> None:
    """The last one may come from an object store, for example."""
    assert not has_lost_a_peer(RuntimeError(text))
