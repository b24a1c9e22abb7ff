"""Streams of a GPU and their events, which are nothing on the CPU: there, what was called has happened."""

from collections import deque
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from enum import Enum

import torch


class Lane(Enum):
    """What runs beside compute."""

    COPY_IN = "copy in"
    COPY_OUT = "copy out"
    COLLECTIVE = "collective"
    UPDATE = "update"


Mark = torch.cuda.Event | None
"""A moment on a lane. None: long past."""

Updated = Future[Mark]
"""Done when a unit's newest optimizer step is; the mark says when on its lane."""


class Lanes:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        is_gpu = device.type == "cuda"
        self._streams = {lane: torch.cuda.Stream(device) for lane in Lane} if is_gpu else {}

    @property
    def are_real(self) -> bool:
        return bool(self._streams)

    def enter_thread(self) -> None:
        """Every thread but the main one calls this first."""
        # A new thread is on the first GPU, and to go back there would make a context that takes memory on it.
        if self._streams:
            torch.cuda.set_device(self._device)

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """What is called inside goes to this lane; outside, to compute."""
        return torch.cuda.stream(self._streams[lane]) if self._streams else nullcontext()

    def mark(self) -> Mark:
        """Everything called so far on the present lane."""
        if not self._streams:
            return None
        return self._recorded(torch.cuda.Event())

    def timed_mark(self) -> torch.cuda.Event:
        """Like `mark`, but with a time that can be read; for real lanes only."""
        return self._recorded(torch.cuda.Event(enable_timing=True))

    def _recorded(self, event: torch.cuda.Event) -> torch.cuda.Event:
        event.record(torch.cuda.current_stream(self._device))
        return event

    def follow(self, mark: Mark) -> None:
        """What is called next on the present lane happens after the mark."""
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)


def reach(mark: Mark) -> None:
    """The calling thread waits until the mark has happened."""
    if mark is not None:
        mark.synchronize()


class Throttle:
    """Keeps the thread that calls passes at most `ahead` of them before the GPU.

    Memory is given back where the thread stands, not where the GPU does: one that called a whole step at once would
    hold messages and stashed activations of all its passes. None: no limit within a step. From step to step there
    always is one: a step ends with the agreement on the loss, for which the passes called before it have ended.
    """

    def __init__(self, lanes: Lanes, ahead: int | None) -> None:
        self._lanes, self._ahead = lanes, ahead
        self._called: deque[Mark] = deque()

    def called(self) -> None:
        """A pass was; waits for the one that was called `ahead` passes before it."""
        if self._ahead is None:
            return
        self._called.append(self._lanes.mark())
        if len(self._called) > self._ahead:
            reach(self._called.popleft())
