"""A stranger who reaches the rendezvous port without the key runs no code, counts as no worker and changes nothing."""

import ast
import asyncio
import base64
import os
import pickle
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pseudoreal_trainer
import pytest
from pseudoreal_trainer.runtime.rendezvous import server
from pseudoreal_trainer.runtime.rendezvous.client import join_rendezvous as come_to
from pseudoreal_trainer.runtime.rendezvous.handshake import GREETING
from pseudoreal_trainer.runtime.rendezvous.workers import WorkerDescription
from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from tests.unit.trainer.runtime.rendezvous.support.meetings import KEY, Meeting, coming, is_closed_by_peer, meeting


class Evil:
    """An object whose unpickling creates a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._folder),)


def _write_to_store(port: int, key: str, value: str) -> None:
    limit = timedelta(seconds=1)
    TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=limit).set(key, value)


def test_a_stranger_with_torch_s_store_runs_no_code_in_worker_0(tmp_path: Path) -> None:
    """torch's own rendezvous would make worker 0 unpickle this value within seconds."""
    with meeting(2) as held, coming(held) as come:
        host = come(0)
        held.await_door()
        state = base64.b64encode(pickle.dumps(Evil(tmp_path / "read"))).decode()
        with pytest.raises(DistNetworkError):
            _write_to_store(held.port, "torch.rendezvous.job-phase-1", state)
        assert [met.result().rank for met in (host, come(1))] == [0, 1]
    assert not (tmp_path / "read").exists()


def _garbage(_: Meeting) -> bytes:
    return os.urandom(65_536)


def _pickle(_: Meeting) -> bytes:
    return pickle.dumps(Evil(Path("read")))


def _store_request(_: Meeting) -> bytes:
    """Return a request of torch's TCPStore client: a magic number, and a key to set."""
    return struct.pack("<BIBQ3sQ1s", 13, 0x3C85F7CE, 0, 3, b"key", 1, b"1")


def _guessed_proof(_: Meeting) -> bytes:
    return GREETING + bytes(32) + b"M" + bytes(32) + b"\xff\xff" + bytes(32) + b"x" * 65_535


def _guessed_way_to_the_store(_: Meeting) -> bytes:
    return GREETING + bytes(32) + b"S" + bytes(32)


@pytest.mark.parametrize(
    ("said", "because"),
    [
        (_garbage, "something else than a greeting"),
        (_pickle, "something else than a greeting"),
        (_store_request, "something else than a greeting"),
        (_guessed_proof, "does not know the secret"),
        (_guessed_way_to_the_store, "does not know the secret"),
    ],
)
def test_whatever_a_stranger_sends_it_is_rejected_with_a_reason_and_the_workers_meet(
    said: Callable[[Meeting], bytes], because: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with meeting(2) as held, coming(held) as come:
        host = come(0)
        held.await_door()
        stranger = held.call()
        # The worker may have closed the connection before the end of either call.
        with suppress(OSError):
            stranger.sendall(said(held))
            stranger.shutdown(socket.SHUT_WR)
        assert is_closed_by_peer(stranger)
        assert [met.result().rank for met in (host, come(1))] == [0, 1]
    told = capsys.readouterr().out
    assert "stranger_refused" in told
    assert "127.0.0.1" in told
    assert because in told


def test_a_connection_that_only_tests_the_port_is_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    """Workers do so before they join, and so do probes."""
    with meeting(2) as held, coming(held) as come:
        host = come(0)
        held.await_door()
        held.call().close()
        assert [met.result().rank for met in (host, come(1))] == [0, 1]
    assert "stranger" not in capsys.readouterr().out


def test_a_worker_with_another_secret_is_rejected_and_both_sides_log_it(capsys: pytest.CaptureFixture[str]) -> None:
    with meeting(2, seconds=1) as held, coming(held) as come:
        host = come(0)
        held.await_door()
        with pytest.raises(RendezvousTimeoutError):
            come(1, b"another" * 8).result()
        assert held.missing() == [1]
        with pytest.raises(RendezvousTimeoutError, match="these have not come: 1"):
            host.result()
    told = capsys.readouterr().out
    assert told.count("worker_0_not_met") == 1
    assert "what answers there does not know the secret of this meeting" in told
    assert "it left without a proof that it knows the secret of this meeting" in told


def test_a_worker_sends_nothing_to_a_stranger_posing_as_worker_0() -> None:
    """Only the greeting was sent, not even the worker's location."""
    with meeting(2, seconds=1) as held, coming(held) as come, socket.create_server(("127.0.0.1", held.port)) as server:
        guest = come(1)
        connected, _ = server.accept()
        said = connected.recv(4096)
        connected.sendall(bytes(64))
        assert connected.recv(4096) == b""
        assert (said[:8], len(said)) == (GREETING, 40)
        server.close()
        with pytest.raises(RendezvousTimeoutError):
            guest.result()


def test_silent_strangers_do_not_keep_workers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far more strangers than handshake slots connect; the oldest are disconnected."""
    monkeypatch.setattr(server, "HANDSHAKES", 8)
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 600)
    with meeting(3) as held, coming(held) as come:
        host = come(0)
        held.await_door()
        strangers = [held.call() for _ in range(50)]
        assert is_closed_by_peer(strangers[0])
        assert [met.result().rank for met in (host, come(2), come(1))] == [0, 2, 1]
        assert is_closed_by_peer(strangers[40])
        for stranger in strangers:
            stranger.close()


def test_a_silent_stranger_is_disconnected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 0.2)
    with meeting(2) as held, coming(held) as come:
        come(0)
        held.await_door()
        assert is_closed_by_peer(held.call())
        come(1).result()
    assert "it has proven nothing within" in capsys.readouterr().out


def test_log_lines_about_strangers_are_limited(capsys: pytest.CaptureFixture[str]) -> None:
    with meeting(2) as held, coming(held) as come:
        come(0)
        held.await_door()
        for _ in range(30):
            with held.call() as stranger:
                stranger.sendall(bytes(100))
                assert is_closed_by_peer(stranger)
        come(1).result()
    assert capsys.readouterr().out.count("stranger_refused") == 1


def test_a_replayed_handshake_is_rejected() -> None:
    """A stranger replays the recorded bytes of a worker, including every proof."""
    with meeting(2) as held, coming(held) as come:
        host = come(0)
        held.await_door()
        recorded = _record(held.port)
        assert host.result().rank == 0
    with meeting(2) as again, coming(again) as come:
        host = come(0)
        again.await_door()
        with again.call() as stranger:
            stranger.sendall(recorded)
            assert is_closed_by_peer(stranger)
        assert again.missing() == [1]
        assert [met.result().rank for met in (host, come(1))] == [0, 1]


def _record(port: int) -> bytes:
    """Return all bytes that worker 1 sends while joining, recorded by a proxy between the worker and worker 0."""
    said = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between, ThreadPoolExecutor(3) as threads:
        seat, here = WorkerDescription(1, "node-1", None), between.getsockname()
        guest = threads.submit(asyncio.run, come_to(here, KEY, seat))
        near, _ = between.accept()
        with near, socket.create_connection(("127.0.0.1", port)) as far:

            def relay(source: socket.socket, target: socket.socket, keep: bytearray) -> None:
                while part := source.recv(4096):
                    keep.extend(part)
                    target.sendall(part)
                target.shutdown(socket.SHUT_WR)

            ways = [threads.submit(relay, near, far, said), threads.submit(relay, far, near, bytearray())]
            assert guest.result()[0].number == 1
            for way in ways:
                way.result()
    return bytes(said)


_NO_OBJECTS = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "pickle", "cloudpickle", "dill", "marshal", "shelve"),
)


def test_the_trainer_unpickles_nothing_from_the_network() -> None:
    """Modules that read pickles are excluded, and so are torch's object collectives, which unpickle data of other
    ranks. torch checkpoints, whose index is a pickle, are only written."""
    folder = Path(pseudoreal_trainer.__file__).parent
    found = [
        f"{path.relative_to(folder)}: {name}"
        for path in folder.rglob("*.py")
        if any(word in (text := path.read_text()) for word in _NO_OBJECTS)
        for node in ast.walk(ast.parse(text))
        for name in _names(node)
        if name in _NO_OBJECTS
    ]
    assert found == []


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Import | ast.ImportFrom):
        module = getattr(node, "module", None) or ""
        return [*module.split("."), *(part for alias in node.names for part in alias.name.split("."))]
    return []
