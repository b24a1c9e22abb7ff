"""Bytes that arrive before both ends of a tunnel are connected are forwarded in order."""

import asyncio

import pytest
from pseudoreal_trainer.runtime.rendezvous.tunnel import _EARLY_BYTES, _RelayEnd


class Connection(asyncio.Transport):
    """A transport that ignores `pause_reading`, like asyncio's before Python 3.11.4."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closed = b"", False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close


@pytest.fixture
def ends() -> tuple[_RelayEnd, _RelayEnd]:
    first, second = _RelayEnd(lambda: None), _RelayEnd(lambda: None)
    first.other, second.other = second, first
    return first, second


def test_bytes_received_before_the_tunnel_starts_keep_their_order(ends: tuple[_RelayEnd, _RelayEnd]) -> None:
    first, second = ends
    near, far = Connection(), Connection()
    first.connection_made(near)
    first.data_received(b"a")
    second.connection_made(far)
    first.data_received(b"b")
    second.data_received(b"x")
    first.begin()
    second.begin()
    first.data_received(b"c")
    assert (far.written, near.written) == (b"abc", b"x")
    first.connection_lost(None)
    assert far.closed


def test_an_end_that_is_lost_early_closes_the_other_after_its_bytes(ends: tuple[_RelayEnd, _RelayEnd]) -> None:
    first, second = ends
    far = Connection()
    first.connection_made(Connection())
    first.data_received(b"a")
    first.connection_lost(None)
    second.connection_made(far)
    first.begin()
    assert (far.written, far.closed) == (b"a", True)


def test_bytes_kept_before_the_tunnel_starts_are_bounded(ends: tuple[_RelayEnd, _RelayEnd]) -> None:
    first, _ = ends
    near = Connection()
    first.connection_made(near)
    first.data_received(bytes(_EARLY_BYTES))
    assert not near.closed
    first.data_received(b"a")
    assert near.closed
