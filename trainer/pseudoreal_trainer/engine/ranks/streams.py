"""CUDA streams and events. On the CPU both are no-ops: each call is done when it returns."""

from collections import deque
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from enum import Enum

import torch


class Stream(Enum):
    """CUDA streams beside the compute stream."""

    COPY_IN = "copy in"
    COPY_OUT = "copy out"
    COLLECTIVE = "collective"
    UPDATE = "update"


Event = torch.cuda.Event | None
"""CUDA event; None: an event that has passed."""

Updated = Future[Event]
"""Future of a unit's newest optimizer step: completes once the step is launched, with the event after which the step is
done."""


class Streams:
    """CUDA streams of a rank's device; none on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        is_gpu = device.type == "cuda"
        self._streams = {stream: torch.cuda.Stream(device) for stream in Stream} if is_gpu else {}

    @property
    def are_real(self) -> bool:
        return bool(self._streams)

    def enter_thread(self) -> None:
        """Make the rank's device current in this thread. Every thread besides the main thread calls this before it
        launches work on the device."""
        # The current device of a new thread is the first GPU. Switching back to that GPU would create a context that
        # takes memory on it.
        if self._streams:
            torch.cuda.set_device(self.device)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Return a context that launches kernels on this stream instead of the compute stream."""
        return torch.cuda.stream(self._streams[stream]) if self._streams else nullcontext()

    def record_event(self) -> Event:
        """Record and return an event after everything launched so far on the current stream."""
        if not self._streams:
            return None
        return self._recorded(torch.cuda.Event())

    def record_timed_event(self) -> torch.cuda.Event:
        """Record and return an event whose time can be read; on GPUs only."""
        return self._recorded(torch.cuda.Event(enable_timing=True))

    def _recorded(self, event: torch.cuda.Event) -> torch.cuda.Event:
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait_event(self, event: Event) -> None:
        """Make later work on the current stream wait for the event. The calling thread does not wait."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


def synchronize(event: Event) -> None:
    """Make the calling thread wait until the event has passed."""
    if event is not None:
        event.synchronize()


class RunAheadLimit:
    """Keeps the thread that launches passes at most `ahead` passes ahead of the GPU.

    The thread frees memory when it executes a record, and the GPU may reach the record much later. A thread that
    launched a whole step at once would hold messages and offloaded activations of all passes. If `ahead` is None, there
    is no limit within a step. Between steps there always is a limit: a step ends with the agreement on the loss, after
    all passes of the step.
    """

    def __init__(self, streams: Streams, ahead: int | None) -> None:
        self._streams, self._ahead = streams, ahead
        self._passes: deque[Event] = deque()

    def pass_launched(self) -> None:
        """Record that a pass was launched. Wait until the GPU has finished the pass launched `ahead` passes earlier."""
        if self._ahead is None:
            return
        self._passes.append(self._streams.record_event())
        if len(self._passes) > self._ahead:
            synchronize(self._passes.popleft())
