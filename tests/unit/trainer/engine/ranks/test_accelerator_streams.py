"""Streams and events are those of the rank's accelerator, of any vendor; none on the CPU."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from pseudoreal_trainer.engine.ranks.streams import Stream, Streams, synchronize

from tests.unit.trainer.engine.support.fake_accelerator import FakeAccelerator

XPU, CUDA = torch.device("xpu", 1), torch.device("cuda", 1)


@pytest.fixture(params=[XPU, CUDA], ids=str)
def accelerator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    return FakeAccelerator(monkeypatch, request.param)


def test_a_cpu_has_no_streams_and_its_events_have_passed() -> None:
    streams = Streams(torch.device("cpu"))
    streams.enter_thread()
    with streams.on(Stream.UPDATE):
        event = streams.record_event()
    streams.wait_event(event)
    synchronize(event)
    assert event is None
    assert not streams.are_real


def test_events_are_recorded_and_waited_for_on_the_current_stream(accelerator: FakeAccelerator) -> None:
    streams = Streams(accelerator.device)
    event: Any = streams.record_event()
    assert event.recorded == accelerator.current
    with streams.on(Stream.COPY_OUT):
        copy_out = accelerator.current
        streams.wait_event(event)
        copied: Any = streams.record_event()
    assert event.waiting == [copy_out]
    assert copied.recorded == copy_out != accelerator.current
    streams.wait_event(copied)
    assert copied.waiting == [accelerator.current]


def test_each_stream_is_one_of_its_own_on_the_device_of_the_rank(accelerator: FakeAccelerator) -> None:
    streams, found = Streams(accelerator.device), {accelerator.current}
    for stream in Stream:
        with streams.on(stream):
            found.add(accelerator.current)
    assert {stream.device for stream in found} == {accelerator.device}
    assert len(found) == 1 + len(Stream)


def test_a_failure_leaves_the_thread_on_the_stream_it_came_from(accelerator: FakeAccelerator) -> None:
    streams = Streams(accelerator.device)
    with streams.on(Stream.COPY_IN):
        copy_in = accelerator.current
        with pytest.raises(OSError, match="a disk"), streams.on(Stream.UPDATE):
            raise OSError("a disk")
        assert accelerator.current == copy_in


def test_two_threads_that_use_one_stream_at_the_same_time_return_to_their_own(accelerator: FakeAccelerator) -> None:
    """torch.Stream keeps the streams to return to in one stack, which all threads share."""
    streams = Streams(accelerator.device)
    owns = (Stream.COPY_IN, Stream.COPY_OUT)
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        threads, contexts = (first, second), [streams.on(Stream.UPDATE) for _ in owns]
        for thread, own in zip(threads, owns, strict=True):
            thread.submit(streams.on(own).__enter__).result()
        before = [thread.submit(lambda: accelerator.current).result() for thread in threads]
        for thread, context in zip(threads, contexts, strict=True):
            thread.submit(context.__enter__).result()
        for thread, context in zip(threads, contexts, strict=True):
            thread.submit(context.__exit__, None, None, None).result()
        assert [thread.submit(lambda: accelerator.current).result() for thread in threads] == before
        assert len({*before}) == len(owns)


def test_a_thread_makes_the_device_of_the_rank_its_own(accelerator: FakeAccelerator) -> None:
    streams = Streams(accelerator.device)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(lambda: accelerator.current_device).result() != accelerator.device
    with ThreadPoolExecutor(1, initializer=streams.enter_thread) as thread:
        assert thread.submit(lambda: accelerator.current_device).result() == accelerator.device


def test_threads_sleep_while_they_wait_for_an_event_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(FakeAccelerator(monkeypatch, CUDA).device)
    events: list[Any] = [streams.record_event(), streams.record_timed_event()]
    assert [event.arguments["blocking"] for event in events] == [True, True]
    assert [event.arguments["enable_timing"] for event in events] == [False, True]


def test_other_vendors_have_the_events_that_torch_has_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(FakeAccelerator(monkeypatch, XPU).device)
    events: list[Any] = [streams.record_event(), streams.record_timed_event()]
    assert [event.arguments for event in events] == [
        {"device": XPU, "enable_timing": False},
        {"device": XPU, "enable_timing": True},
    ]
