"""The device that executes late, on small programs: each has a right version, whose numbers are right in all schedules,
and a wrong one, whose numbers some schedule makes wrong."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pseudoreal_trainer.engine.ranks.streams import Stream, Streams, synchronize
from pseudoreal_trainer.engine.state.pinned import PinnedMemory
from torch import Tensor

from tests.unit.trainer.engine.races.support.emulation import Emulation
from tests.unit.trainer.engine.races.support.late import (
    Drawn,
    Earliest,
    LateMachine,
    LateNetwork,
    Latest,
    Schedule,
    Starving,
    Stuck,
)
from tests.unit.trainer.engine.races.support.machine import COMPUTE

Program = Callable[[Streams, int], list[float]]


def _run(program: Program, schedule: Schedule, *, world: int = 1, **fields: Any) -> tuple[list[list[float]], list[str]]:
    """Run `program(streams, rank)` on each rank. Return the numbers of each rank, and the kinds of what is reported."""
    machine = LateMachine(**{"schedule": schedule} | fields)
    numbers: list[list[float]] = [[] for _ in range(world)]

    def work(rank: int) -> None:
        numbers[rank].extend(program(machine.streams(machine.rank.device), rank))

    Emulation(machine, LateNetwork(machine, world)).run(work, world)
    machine.end()
    return numbers, [race.kind for race in machine.detector.races]


def _schedules() -> Iterator[Schedule]:
    yield from (Latest(), Earliest())
    for stream in (COMPUTE, *(stream.value for stream in Stream), "group"):
        yield Starving(stream)
    yield from map(Drawn, range(3))


def _are_right(program: Program, numbers: list[float], world: int = 1) -> list[bool]:
    """Return whether each schedule computes these numbers on all ranks."""
    return [_run(program, schedule, world=world)[0] == [numbers] * world for schedule in _schedules()]


def _bytes(numbers: int) -> int:
    return 4 * numbers


def test_a_kernel_is_executed_once_somebody_waits_for_it() -> None:
    done: list[bool] = []

    def program(streams: Streams, _: int) -> list[float]:
        vector = torch.ones(2, device=streams.device).add_(1)
        added = streams.record_event()
        assert added is not None
        done.append(added.query())
        synchronize(added)
        done.append(added.query())
        numbers: list[float] = vector.tolist()
        return numbers

    assert _run(program, Latest()) == ([[2.0, 2.0]], [])
    assert done == [False, True]


@pytest.mark.parametrize("is_right", [True, False])
def test_a_stream_that_does_not_wait_for_another_reads_early(is_right: bool) -> None:
    def program(streams: Streams, _: int) -> list[float]:
        vector = torch.ones(2, device=streams.device)
        computed = streams.record_event()
        with streams.on(Stream.COPY_IN):
            if is_right:
                streams.wait_event(computed)
            numbers: list[float] = (vector + 1).tolist()
        return numbers

    assert all(_are_right(program, [2.0, 2.0])) is is_right


@pytest.mark.parametrize("is_right", [True, False])
def test_a_stream_that_does_not_wait_for_another_overwrites_what_it_reads(is_right: bool) -> None:
    def program(streams: Streams, _: int) -> list[float]:
        vector = torch.ones(2, device=streams.device)
        synchronize(streams.record_event())
        copy = vector.clone()
        copied = streams.record_event()
        with streams.on(Stream.COPY_IN):
            if is_right:
                streams.wait_event(copied)
            vector.zero_()
            synchronize(streams.record_event())
        numbers: list[float] = copy.tolist()
        return numbers

    assert all(_are_right(program, [1.0, 1.0])) is is_right


@pytest.mark.parametrize("is_right", [True, False])
def test_the_device_reads_pinned_memory_when_it_executes_the_copy(is_right: bool) -> None:
    def program(streams: Streams, _: int) -> list[float]:
        memory = PinnedMemory(streams.device).allocate(_bytes(2)).view(torch.float32)
        memory.fill_(1)
        vector = torch.empty(2, device=streams.device).copy_(memory, non_blocking=True)
        if is_right:
            synchronize(streams.record_event())
        memory.fill_(2)
        numbers: list[float] = vector.tolist()
        return numbers

    assert all(_are_right(program, [1.0, 1.0])) is is_right


@pytest.mark.parametrize("is_right", [True, False])
def test_the_host_reads_pinned_memory_after_the_copy_to_it(is_right: bool) -> None:
    def program(streams: Streams, _: int) -> list[float]:
        memory = PinnedMemory(streams.device).allocate(_bytes(2)).view(torch.float32)
        memory.copy_(torch.ones(2, device=streams.device), non_blocking=True)
        if is_right:
            synchronize(streams.record_event())
        numbers: list[float] = memory.tolist()
        return numbers

    assert all(_are_right(program, [1.0, 1.0])) is is_right


def test_copies_from_and_to_pageable_memory_make_the_host_wait() -> None:
    def program(streams: Streams, _: int) -> list[float]:
        memory = torch.ones(2)
        vector = torch.empty(2, device=streams.device).copy_(memory, non_blocking=True)
        memory.fill_(2)
        numbers: list[float] = torch.empty(2).copy_(vector + 1, non_blocking=True).tolist()
        return numbers

    assert all(_are_right(program, [2.0, 2.0]))


@pytest.mark.parametrize("is_right", [True, False])
def test_freed_memory_is_lost(is_right: bool) -> None:
    """The copy still reads the memory that the next tensor of the compute stream gets."""

    def program(streams: Streams, _: int) -> list[float]:
        memory = PinnedMemory(streams.device).allocate(_bytes(2)).view(torch.float32)
        vector = torch.ones(2, device=streams.device)
        computed = streams.record_event()
        with streams.on(Stream.COPY_OUT):
            streams.wait_event(computed)
            memory.copy_(vector, non_blocking=True)
            copied = streams.record_event()
        if is_right:
            synchronize(copied)
        del vector
        torch.ones(200, device=streams.device)
        synchronize(streams.record_event())
        synchronize(copied)
        numbers: list[float] = memory.tolist()
        return numbers

    assert all(_are_right(program, [1.0, 1.0])) is is_right


def test_freed_memory_goes_to_the_next_tensor_of_its_stream() -> None:
    addresses: dict[str, int] = {}

    def program(streams: Streams, _: int) -> list[float]:
        first = torch.ones(2, device=streams.device)
        addresses["first"] = first.data_ptr()
        with streams.on(Stream.COPY_IN):
            other = torch.ones(2, device=streams.device)
        del first
        with streams.on(Stream.COPY_IN):
            addresses["another stream"] = torch.ones(2, device=streams.device).data_ptr()
        second = torch.ones(2, device=streams.device)
        addresses["second"] = second.data_ptr()
        numbers: list[float] = (second + 1).tolist()
        return [*numbers, len(other)]

    assert _run(program, Latest()) == ([[2.0, 2.0, 2.0]], [])
    assert addresses["second"] == addresses["first"] != addresses["another stream"]


def test_memory_that_nobody_has_written_is_not_a_number() -> None:
    def program(streams: Streams, _: int) -> list[float]:
        torch.ones(2, device=streams.device)
        numbers: list[float] = torch.empty(2, device=streams.device).tolist()
        return numbers

    ((first, second),), _ = _run(program, Latest())
    assert math.isnan(first)
    assert math.isnan(second)


def test_memory_is_filled_by_another_stream_that_waits_for_its_own() -> None:
    """The end of a tensor must not destroy the content of the next one."""

    def program(streams: Streams, _: int) -> list[float]:
        torch.ones(2, device=streams.device)
        used = streams.record_event()
        vector = torch.empty(2, device=streams.device)
        with streams.on(Stream.COPY_IN):
            streams.wait_event(used)
            vector.fill_(1)
            filled = streams.record_event()
        streams.wait_event(filled)
        numbers: list[float] = vector.tolist()
        return numbers

    assert all(_are_right(program, [1.0, 1.0]))


def test_memory_may_be_used_until_the_next_allocation_on_its_stream() -> None:
    """The stream waits for the reader of the memory only before it allocates."""

    def program(streams: Streams, _: int) -> list[float]:
        memory = PinnedMemory(streams.device).allocate(_bytes(2)).view(torch.float32)
        vector = torch.ones(2, device=streams.device)
        computed = streams.record_event()
        with streams.on(Stream.COPY_OUT):
            streams.wait_event(computed)
            memory.copy_(vector, non_blocking=True)
            copied = streams.record_event()
        del vector
        streams.wait_event(copied)
        torch.ones(2, device=streams.device)
        synchronize(streams.record_event())
        numbers: list[float] = memory.tolist()
        return numbers

    assert all(_are_right(program, [1.0, 1.0]))


@pytest.mark.parametrize(
    "read", [Tensor.tolist, lambda tensor: float(tensor[0]), lambda tensor: tensor.cpu(), Tensor.nonzero, torch.equal]
)
def test_reading_a_value_waits_for_the_current_stream_alone(read: Callable[..., Any]) -> None:
    done: list[bool] = []

    def program(streams: Streams, _: int) -> list[float]:
        vector = torch.ones(2, device=streams.device)
        computed = streams.record_event()
        with streams.on(Stream.COPY_IN):
            torch.ones(2, device=streams.device)
            other = streams.record_event()
        read(*([vector, vector] if read is torch.equal else [vector]))
        assert computed is not None
        assert other is not None
        done.extend([computed.query(), other.query()])
        return []

    _run(program, Latest())
    assert done == [True, False]


def test_an_index_of_booleans_makes_the_host_wait() -> None:
    def program(streams: Streams, _: int) -> list[float]:
        vector = torch.arange(4, device=streams.device)
        chosen = vector[vector > 1]
        chosen[chosen > 2] = 7
        numbers: list[float] = chosen.tolist()
        return numbers

    assert all(_are_right(program, [2, 7]))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("is_right", [True, False])
def test_the_result_of_a_collective_is_read_after_its_wait(is_right: bool, device: str) -> None:
    def program(streams: Streams, rank: int) -> list[float]:
        vector = torch.full((2,), rank + 1.0, device=streams.device if device == "cuda" else None)
        work = dist.all_reduce(vector, async_op=True)
        assert work is not None
        if is_right:
            work.wait()
        total = vector.clone()
        work.wait()
        numbers: list[float] = total.tolist()
        return numbers

    found = [_run(program, schedule, world=2, device=device) for schedule in (Latest(), Starving("group"))]
    assert all(numbers == [[3.0, 3.0]] * 2 for numbers, _ in found) is is_right


@pytest.mark.parametrize("is_right", [True, False])
def test_a_collective_starts_after_the_current_stream_alone(is_right: bool) -> None:
    def program(streams: Streams, _: int) -> list[float]:
        vector = torch.ones(2, device=streams.device)
        computed = streams.record_event()
        with streams.on(Stream.COLLECTIVE):
            if is_right:
                streams.wait_event(computed)
            work = dist.all_reduce(vector, async_op=True)
        assert work is not None
        work.wait()
        numbers: list[float] = vector.tolist()
        return numbers

    assert all(_are_right(program, [2.0, 2.0], world=2)) is is_right


def test_collectives_and_messages_move_the_data_of_each_rank() -> None:
    def program(streams: Streams, rank: int) -> list[float]:
        own = torch.tensor([rank + 1.0, 10.0 * (rank + 1)], device=streams.device)
        whole, half = torch.empty(4, device=streams.device), torch.empty(1, device=streams.device)
        dist.all_gather_into_tensor(whole, own)
        dist.reduce_scatter_tensor(half, own)
        got = torch.empty(3 if rank else 1, device=streams.device)
        sizes = [[1, 1], [0, 2]]
        dist.all_to_all_single(got, own, [sizes[other][rank] for other in range(2)], sizes[rank])
        received = torch.empty(2, device=streams.device)
        work = dist.isend(own, 1) if rank == 0 else dist.irecv(received, 0)
        assert work is not None
        work.wait()
        return [*whole.tolist(), *half.tolist(), *got.tolist(), *(received.tolist() if rank else [])]

    for schedule in _schedules():
        (first, second), _ = _run(program, schedule, world=2)
        assert first == [1.0, 10.0, 2.0, 20.0, 3.0, 1.0]
        assert second == [1.0, 10.0, 2.0, 20.0, 30.0, 10.0, 2.0, 20.0, 1.0, 10.0]


@pytest.mark.parametrize("queues", [1, 2, 8])
def test_streams_that_share_a_hardware_queue_wait_for_each_other(queues: int) -> None:
    """Each rank receives before it sends, on streams of their own. In one queue the send waits for the receive."""

    def program(streams: Streams, rank: int) -> list[float]:
        groups: list[Any] = [dist.new_group([0, 1]) for _ in range(2)]
        sent, received = torch.full((2,), rank + 1.0, device=streams.device), torch.empty(2, device=streams.device)
        works = [dist.irecv(received, 1 - rank, groups[1 - rank]), dist.isend(sent, 1 - rank, groups[rank])]
        for work in works:
            assert work is not None
            work.wait()
        numbers: list[float] = received.tolist()
        return [sum(numbers)]

    if queues > 1:
        assert _run(program, Latest(), world=2, queues=queues)[0] == [[4.0], [2.0]]
        return
    with pytest.raises(Stuck) as stuck:
        _run(program, Latest(), world=2, queues=1, patience=0.5)
    assert "queue 0 of rank 0: receive" in str(stuck.value)
    assert "waits for other ranks, where it is no. " in str(stuck.value)


def test_a_collective_that_a_rank_does_not_launch_ends_the_run() -> None:
    def program(streams: Streams, rank: int) -> list[float]:
        vector = torch.ones(2, device=streams.device)
        if rank == 0:
            dist.all_reduce(vector)
        numbers: list[float] = vector.tolist()
        return numbers

    with pytest.raises(Stuck, match=r"waits for ranks \[1\], which have not launched it"):
        _run(program, Latest(), world=2, patience=0.5)


def test_pinned_memory_is_not_released_before_the_copies_from_it() -> None:
    def program(streams: Streams, _: int) -> list[float]:
        block = PinnedMemory(streams.device).allocate(64)
        torch.empty(64, dtype=torch.uint8, device=streams.device).copy_(block, non_blocking=True)
        torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
        return []

    assert _run(program, Latest())[1] == ["misuse"]


def test_a_kernel_that_traps_is_reported() -> None:
    def program(streams: Streams, _: int) -> list[float]:
        table, index = torch.ones(2, 2, device=streams.device), torch.empty(1, dtype=torch.int64, device=streams.device)
        torch.nn.functional.embedding(index, table)
        return []

    assert _run(program, Latest())[1] == ["fault"]


def test_a_seed_repeats_its_schedule() -> None:
    def program(streams: Streams, _: int) -> list[float]:
        vector = torch.zeros((), device=streams.device)
        synchronize(streams.record_event())
        for number in range(40):
            with streams.on([Stream.COPY_IN, Stream.COPY_OUT, Stream.UPDATE][number % 3]):
                vector.mul_(2).add_(1 + number % 3)
        torch.accelerator.synchronize()
        return [vector.item()]

    found = [_run(program, Drawn(seed))[0] for seed in range(6)]
    assert found == [_run(program, Drawn(seed))[0] for seed in range(6)]
    assert len({tuple(numbers) for (numbers,) in found}) > 3
