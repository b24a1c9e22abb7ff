"""Streams of a GPU and their events, which are nothing on the CPU: there, what was called has happened."""

from collections import deque
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from enum import Enum

import torch


class Lane(Enum):
    """A stream beside that of compute."""

    COPY_IN = "copy in"
    COPY_OUT = "copy out"
    COLLECTIVE = "collective"
    UPDATE = "update"


Mark = torch.cuda.Event | None
"""A moment on a lane. None: a moment that is past."""

Updated = Future[Mark]
"""Ends when a unit's newest optimizer step has been called; its mark says when that is done on its lane."""


class Lanes:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        is_gpu = device.type == "cuda"
        self._streams = {lane: torch.cuda.Stream(device) for lane in Lane} if is_gpu else {}

    @property
    def are_real(self) -> bool:
        return bool(self._streams)

    def enter_thread(self) -> None:
        """Makes the rank's device current in a thread; every thread but the main one calls this first."""
        # A new thread is on the first GPU, and to go back there would make a context that takes memory on it.
        if self._streams:
            torch.cuda.set_device(self.device)

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """A context whose kernels go to this lane; outside of it they go to compute."""
        return torch.cuda.stream(self._streams[lane]) if self._streams else nullcontext()

    def mark(self) -> Mark:
        """The mark after everything that was called so far on the present lane."""
        if not self._streams:
            return None
        return self._recorded(torch.cuda.Event())

    def timed_mark(self) -> torch.cuda.Event:
        """A mark, as `mark` gives it, whose time can be read; for real lanes only."""
        return self._recorded(torch.cuda.Event(enable_timing=True))

    def _recorded(self, event: torch.cuda.Event) -> torch.cuda.Event:
        event.record(torch.cuda.current_stream(self.device))
        return event

    def follow(self, mark: Mark) -> None:
        """Makes what is called next on the present lane happen after the mark. The calling thread does not wait."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)


def reach(mark: Mark) -> None:
    """Makes the calling thread wait until the mark has happened."""
    if mark is not None:
        mark.synchronize()


class Throttle:
    """Keeps the thread that calls passes at most `ahead` passes before the GPU.

    Memory is given back where the thread stands, not where the GPU does: a thread that called a whole step at once
    would hold messages and stashed activations of all its passes. With `ahead` None there is no limit within a step.
    From step to step there always is one: a step ends with the agreement on the loss, for which the passes called
    before it have ended.
    """

    def __init__(self, lanes: Lanes, ahead: int | None) -> None:
        self._lanes, self._ahead = lanes, ahead
        self._called: deque[Mark] = deque()

    def called(self) -> None:
        """Notes that a pass was called; waits for the one that was called `ahead` passes before it."""
        if self._ahead is None:
            return
        self._called.append(self._lanes.mark())
        if len(self._called) > self._ahead:
            reach(self._called.popleft())
