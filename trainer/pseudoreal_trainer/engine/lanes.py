"""Streams of a GPU and their events, which are nothing on the CPU: there, what was called has happened."""

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
        event = torch.cuda.Event()
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
