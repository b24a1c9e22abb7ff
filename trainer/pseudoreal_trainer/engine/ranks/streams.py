"""Streams and events of the accelerator. On the CPU both are no-ops: each call is done when it returns."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum

import torch

from pseudoreal_trainer.accelerator.adapters import adapter_of


class Stream(Enum):
    """Streams beside the compute stream."""

    COPY_IN = "copy in"
    COPY_OUT = "copy out"
    GATHER = "gather"
    """Waits for other ranks during all-gathers, so that copies to the device need not wait for them."""
    COLLECTIVE = "collective"
    """Launches sums of gradients, and waits for none of them."""
    REDUCTION = "reduction"
    """Waits for other ranks during sums of gradients and agreements, so that copies to the host and updates need not
    wait for them."""
    UPDATE = "update"


Event = torch.Event | None
"""Event of the accelerator; None: an event that has passed."""

Updated = Future[Event]
"""Future of a unit's newest optimizer step: completes once the step is launched, with the event after which the step is
done."""


class Streams:
    """Streams of a rank's accelerator; none on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = {} if device.type == "cpu" else {stream: torch.Stream(device) for stream in Stream}

    @property
    def are_real(self) -> bool:
        return bool(self._streams)

    def enter_thread(self) -> None:
        """Make the rank's device current in this thread. Every thread besides the main thread calls this before it
        launches work on the device, or waits for an event of the device."""
        # The current device of a new thread is the first one of the machine. Its first call would create a context that
        # takes memory there.
        if self._streams:
            torch.accelerator.set_device_index(self.device)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Return a context that launches kernels on this stream instead of the compute stream."""
        return self._current(self._streams[stream]) if self._streams else nullcontext()

    def record_event(self) -> Event:
        """Record and return an event after everything launched so far on the current stream."""
        return self._record(is_timed=False) if self._streams else None

    def record_timed_event(self) -> torch.Event:
        """Record and return an event whose time can be read; on accelerators only."""
        return self._record(is_timed=True)

    def wait_event(self, event: Event) -> None:
        """Make later work on the current stream wait for the event. The calling thread does not wait."""
        if event is not None:
            event.wait(torch.accelerator.current_stream(self.device))

    @contextmanager
    def _current(self, stream: torch.Stream) -> Iterator[None]:
        # `with stream` would keep the stream to return to in the stream object itself: of two threads that use it at
        # the same time, each could return to the other's stream.
        before = torch.accelerator.current_stream(self.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def _record(self, *, is_timed: bool) -> torch.Event:
        event = adapter_of(self.device).event(is_timed=is_timed)
        event.record(torch.accelerator.current_stream(self.device))
        return event


def synchronize(event: Event) -> None:
    """Make the calling thread wait until the event has passed."""
    if event is not None:
        event.synchronize()


class RunAheadLimit:
    """Keeps the thread that launches passes at most `ahead` passes ahead of the accelerator.

    The thread frees memory when it executes a record, and the accelerator may reach the record much later. A thread
    that launched a whole step at once would hold messages and offloaded activations of all passes. If `ahead` is None,
    there is no limit within a step. Between steps there always is a limit: a step ends with the agreement on the loss,
    after all passes of the step.
    """

    def __init__(self, streams: Streams, ahead: int | None) -> None:
        self._streams, self._ahead = streams, ahead
        self._passes: deque[Event] = deque()

    def pass_launched(self) -> None:
        """Record that a pass was launched. Wait until the accelerator has finished the pass launched `ahead` passes
        earlier."""
        if self._ahead is None:
            return
        self._passes.append(self._streams.record_event())
        if len(self._passes) > self._ahead:
            synchronize(self._passes.popleft())
