"""Chunks of all sizes pass through a small buffer in order, without overwriting each other."""

import queue
import threading
from contextlib import suppress
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pseudoreal_trainer.engine.state.pinned import PlainMemory
from pseudoreal_trainer.engine.state.snapshot import Ring, SnapshotRing

from tests.support.patience import wait_for


@settings(deadline=None)
@given(st.integers(16, 200), st.lists(st.floats(0.01, 1), min_size=1, max_size=60))
def test_ring_returns_chunks_unchanged_and_in_order(size: int, shares: list[float]) -> None:
    ring = Ring(torch.empty(size, dtype=torch.uint8))
    sizes = [max(1, round(share * ring.largest)) for share in shares]
    full: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()

    def fill() -> None:
        for number, count in enumerate(sizes):
            room = ring.take(count)
            room.fill_(number % 251)
            full.put(room)

    thread = threading.Thread(target=fill)
    thread.start()
    held = [full.get(timeout=60)]
    for number, count in enumerate(sizes):
        # The next one is there before this one is given back, whenever both fit.
        if number + 1 < len(sizes):
            with suppress(queue.Empty):
                held.append(full.get(timeout=0.001))
        assert held[0].tolist() == [number % 251] * count
        for one, other in pairwise(held):
            ends = sorted((part.data_ptr(), part.data_ptr() + len(part)) for part in (one, other))
            assert ends[0][1] <= ends[1][0]
        held.pop(0)
        ring.give_back()
        if not held and number + 1 < len(sizes):
            held.append(full.get(timeout=60))
    thread.join(60)


def test_ring_waits_while_it_is_full() -> None:
    ring = Ring(torch.empty(32, dtype=torch.uint8))
    ring.take(16)
    ring.take(16)
    taken = threading.Event()

    def take() -> None:
        ring.take(8)
        taken.set()

    thread = threading.Thread(target=take)
    thread.start()
    wait_for("it waits for room", lambda: len(ring._changed._waiters) == 1)  # type: ignore[attr-defined]
    assert not taken.is_set()
    ring.give_back()
    assert taken.wait(60)
    thread.join()


@pytest.mark.parametrize("size", [64, 65, 1000])
def test_snapshot_ring_has_the_requested_size_and_is_reused(size: int) -> None:
    room = SnapshotRing(PlainMemory())
    ring = room.of_size(size, crosses_bus=False)
    assert ring.size == size
    assert room.of_size(size - 1, crosses_bus=False) is ring
    assert room.of_size(size + 1, crosses_bus=False).size == size + 1
