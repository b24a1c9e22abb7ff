"""The detector on small programs: each has a right version, in which nothing is found, and a wrong one."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pseudoreal_trainer.engine.ranks.streams import Stream, Streams, synchronize
from pseudoreal_trainer.engine.state.pinned import PinnedMemory
from torch import Tensor

from tests.unit.trainer.engine.races.support.emulation import Emulation
from tests.unit.trainer.engine.races.support.recording import RecordingMachine, RecordingNetwork


def _found(program: Callable[..., Any], world: int = 1, device: str = "cuda") -> list[str]:
    """Run `program(streams, rank)` on each rank. Return the kinds of what the detector finds."""
    machine = RecordingMachine(device)
    emulation = Emulation(machine, RecordingNetwork(machine, world))
    emulation.run(lambda rank: program(machine.streams(machine.rank.device), rank), world)
    return [race.kind for race in machine.detector.races]


@pytest.mark.parametrize("is_right", [True, False])
def test_a_stream_that_does_not_wait_for_another_races_with_it(is_right: bool) -> None:
    def program(streams: Streams, _: int) -> None:
        vector = torch.zeros(8, device=streams.device)
        computed = streams.record_event()
        with streams.on(Stream.COPY_IN):
            if is_right:
                streams.wait_event(computed)
            vector.add_(1)

    assert _found(program) == ([] if is_right else ["race"])


def test_two_streams_may_use_different_parts_of_a_vector() -> None:
    def program(streams: Streams, _: int) -> None:
        vector = torch.zeros(8, device=streams.device)
        ready = streams.record_event()
        with streams.on(Stream.COPY_IN):
            streams.wait_event(ready)
            vector[:4].add_(1)
        vector[4:].add_(1)

    assert _found(program) == []


def test_two_streams_may_read_the_same_vector() -> None:
    def program(streams: Streams, _: int) -> None:
        vector = torch.zeros(8, device=streams.device)
        ready = streams.record_event()
        with streams.on(Stream.COPY_IN):
            streams.wait_event(ready)
            vector + 1
        vector + 1

    assert _found(program) == []


def test_a_wait_orders_nothing_that_is_launched_after_the_event() -> None:
    def program(streams: Streams, _: int) -> None:
        vector = torch.zeros(8, device=streams.device)
        event = streams.record_event()
        vector.add_(1)
        with streams.on(Stream.COPY_IN):
            streams.wait_event(event)
            vector.add_(1)

    assert _found(program) == ["race"]


def test_order_passes_from_stream_to_stream() -> None:
    def program(streams: Streams, _: int) -> None:
        vector = torch.zeros(8, device=streams.device)
        for stream in (Stream.COPY_IN, Stream.COLLECTIVE, Stream.COPY_OUT):
            event = streams.record_event() if stream is Stream.COPY_IN else events[-1]
            with streams.on(stream):
                streams.wait_event(event)
                events.append(streams.record_event())
        with streams.on(Stream.COPY_OUT):
            vector.add_(1)

    events: list[Any] = []
    assert _found(program) == []


@pytest.mark.parametrize("is_right", [True, False])
def test_the_host_waits_for_an_asynchronous_copy_before_it_reads_the_memory(is_right: bool) -> None:
    def program(streams: Streams, _: int) -> None:
        memory = PinnedMemory(streams.device)
        block = memory.allocate(64)
        block.copy_(torch.ones(64, dtype=torch.uint8, device=streams.device), non_blocking=True)
        if is_right:
            synchronize(streams.record_event())
        block.sum()
        memory.free(block)

    assert _found(program) == ([] if is_right else ["race"])


def test_a_copy_to_pageable_memory_makes_the_host_wait() -> None:
    def program(streams: Streams, _: int) -> None:
        torch.ones(64, device=streams.device).cpu().sum()
        torch.empty(64).copy_(torch.ones(64, device=streams.device), non_blocking=True).sum()

    assert _found(program) == []


@pytest.mark.parametrize("read", [Tensor.tolist, lambda tensor: float(tensor[0]), lambda tensor: tensor.cpu()])
def test_reading_a_value_makes_the_host_wait_for_the_current_stream_alone(read: Callable[[Tensor], Any]) -> None:
    def program(streams: Streams, _: int) -> None:
        vector = torch.zeros(8, device=streams.device)
        read(vector)
        with streams.on(Stream.COPY_IN):
            vector.add_(1)  # the host knows that the vector was computed
            read(vector)
        vector.add_(1)
        with streams.on(Stream.COPY_IN):
            read(vector)

    assert _found(program) == ["race"]


@pytest.mark.parametrize("is_right", [True, False])
def test_freed_memory_is_reused_at_once_on_its_own_stream(is_right: bool) -> None:
    """The copy still reads the memory that the next tensor of the compute stream gets."""

    def program(streams: Streams, _: int) -> None:
        block = PinnedMemory(streams.device).allocate(32)
        vector = torch.ones(8, device=streams.device)
        computed = streams.record_event()
        with streams.on(Stream.COPY_OUT):
            streams.wait_event(computed)
            block.view(torch.float32).copy_(vector, non_blocking=True)
            copied = streams.record_event()
        if is_right:
            synchronize(copied)
        del vector
        torch.ones(8, device=streams.device)

    assert _found(program) == ([] if is_right else ["reuse"])


@pytest.mark.parametrize("is_right", [True, False])
def test_memory_of_one_stream_is_filled_by_another_after_its_earlier_content_was_used(is_right: bool) -> None:
    def program(streams: Streams, _: int) -> None:
        torch.ones(8, device=streams.device)
        vector = torch.empty(8, device=streams.device)
        free = streams.record_event()
        with streams.on(Stream.COPY_IN):
            if is_right:
                streams.wait_event(free)
            vector.fill_(1)

    assert _found(program) == ([] if is_right else ["reuse"])


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("is_right", [True, False])
def test_the_result_of_a_collective_is_read_after_its_wait(is_right: bool, device: str) -> None:
    sums: list[float] = []

    def program(streams: Streams, rank: int) -> None:
        vector = torch.full((8,), rank + 1.0, device=_device_of(streams, device))
        work = dist.all_reduce(vector, async_op=True)
        assert work is not None
        if is_right:
            work.wait()
        total = vector.sum()
        work.wait()
        sums.append(float(total))

    assert [*{*_found(program, 2, device)}] == ([] if is_right else ["race"])
    if is_right:
        assert sums == [24.0, 24.0]


def _device_of(streams: Streams, kind: str) -> torch.device:
    return torch.device("cpu") if kind == "cpu" else streams.device


@pytest.mark.parametrize("is_right", [True, False])
def test_a_collective_starts_after_the_current_stream_alone(is_right: bool) -> None:
    def program(streams: Streams, _: int) -> None:
        vector = torch.ones(8, device=streams.device)
        computed = streams.record_event()
        with streams.on(Stream.COLLECTIVE):
            if is_right:
                streams.wait_event(computed)
            work = dist.all_reduce(vector, async_op=True)
        assert work is not None
        work.wait()

    assert [*{*_found(program, 2)}] == ([] if is_right else ["race"])


def test_collectives_move_the_data_of_each_rank() -> None:
    gathered: list[list[float]] = []
    exchanged: list[list[float]] = []
    scattered: list[list[float]] = []

    def program(streams: Streams, rank: int) -> None:
        own = torch.tensor([rank + 1.0, 10.0 * (rank + 1)], device=streams.device)
        whole, half = torch.empty(4, device=streams.device), torch.empty(1, device=streams.device)
        dist.all_gather_into_tensor(whole, own)
        gathered.append(whole.tolist())
        dist.reduce_scatter_tensor(half, own)
        scattered.append(half.tolist())
        got = torch.empty(3 if rank else 1, device=streams.device)
        sizes = [[1, 1], [0, 2]]
        dist.all_to_all_single(got, own, [sizes[other][rank] for other in range(2)], sizes[rank])
        exchanged.append(got.tolist())

    assert _found(program, 2) == []
    assert gathered == [[1.0, 10.0, 2.0, 20.0]] * 2
    assert sorted(scattered) == [[3.0], [30.0]]
    assert sorted(exchanged) == [[1.0], [10.0, 2.0, 20.0]]


def test_a_tensor_is_free_once_the_answer_to_its_message_has_arrived() -> None:
    """The answer proves that the other rank has received all of the message."""

    def program(streams: Streams, rank: int) -> None:
        vector, answer = torch.ones(8, device=streams.device), torch.empty(8, device=streams.device)
        if rank == 0:
            work = dist.isend(vector, 1)
            answered = dist.irecv(answer, 1)
            assert answered is not None
            answered.wait()
            vector.add_(1)
        else:
            dist.recv(answer, 0)
            work = dist.isend(answer, 0)
        assert work is not None
        work.wait()

    assert _found(program, 2) == []


def test_a_message_is_not_dropped_before_it_is_known_to_be_done() -> None:
    def program(streams: Streams, rank: int) -> None:
        vector = torch.ones(8, device=streams.device)
        if rank == 0:
            dist.isend(vector, 1)
        else:
            dist.recv(vector, 0)

    assert _found(program, 2) == ["abandoned"]


@pytest.mark.parametrize("is_right", [True, False])
def test_threads_of_the_host_are_ordered_by_futures(is_right: bool) -> None:
    def program(*_: Any) -> None:
        vector, is_done = torch.ones(8), threading.Event()

        def add() -> None:
            vector.add_(1)
            is_done.set()

        with ThreadPoolExecutor(1) as pool:
            added = pool.submit(add)
            # Orders nothing for the detector, which does not know this event.
            assert is_done.wait(300)
            if is_right:
                added.result()
            vector.add_(1)

    assert _found(program) == ([] if is_right else ["race"])


@pytest.mark.parametrize("is_right", [True, False])
def test_pinned_memory_is_freed_after_all_copies(is_right: bool) -> None:
    def program(streams: Streams, _: int) -> None:
        memory = PinnedMemory(streams.device)
        block = memory.allocate(64)
        vector = torch.ones(64, dtype=torch.uint8, device=streams.device)
        vector.copy_(block, non_blocking=True)
        if is_right:
            memory.free(block)
        else:
            torch.cuda.cudart().cudaHostUnregister(block.data_ptr())

    assert _found(program) == ([] if is_right else ["race"])


def test_tensors_of_host_and_device_do_not_mix() -> None:
    def program(streams: Streams, _: int) -> None:
        vector = torch.ones(8, device=streams.device)
        vector * 2.0 + torch.tensor(1.0)  # numbers may come from the host
        vector + torch.ones(8)

    assert _found(program) == ["misuse"]


def test_tensors_know_their_device() -> None:
    seen: list[Any] = []

    def program(streams: Streams, _: int) -> None:
        there, here = torch.ones(8, device=streams.device), torch.ones(8)
        seen.extend([there.device, there[2:].device, torch.zeros_like(there).device, here.to(streams.device).device])
        seen.extend([here.device, there.cpu().device, there.is_cuda, here.is_cuda])
        seen.append(there.to(torch.float64).device)

    assert _found(program) == []
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert seen == [cuda, cuda, cuda, cuda, cpu, cpu, True, False, cuda]


@pytest.mark.parametrize("is_right", [True, False])
def test_threads_make_the_device_their_own(is_right: bool) -> None:
    def program(streams: Streams, _: int) -> None:
        vector = torch.ones(8, device=streams.device)
        with ThreadPoolExecutor(1, initializer=streams.enter_thread if is_right else None) as pool:
            pool.submit(vector.add_, 1).result()

    assert _found(program) == ([] if is_right else ["misuse"])
