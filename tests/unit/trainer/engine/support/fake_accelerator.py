"""An accelerator without hardware: torch's common interface of streams and events, replaced."""

from dataclasses import dataclass, field
from threading import local
from typing import Any

import pytest
import torch


@dataclass(frozen=True)
class FakeStream:
    """Replacement for torch.Stream."""

    device: torch.device
    number: int


@dataclass(eq=False)
class FakeEvent:
    """Replacement for an event; keeps the arguments and the calls."""

    arguments: dict[str, Any]
    recorded: FakeStream | None = None
    waiting: list[FakeStream] = field(default_factory=list)
    """Streams that wait for this event."""

    def record(self, stream: FakeStream) -> None:
        self.recorded = stream

    def wait(self, stream: FakeStream) -> None:
        self.waiting.append(stream)


class FakeAccelerator:
    """Current device and current stream of each thread, as torch keeps them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
        self.device, self._streams, self._thread = device, 0, local()
        monkeypatch.setattr(torch, "Stream", self._new_stream)
        monkeypatch.setattr(torch, "Event", self._new_event)
        monkeypatch.setattr(torch.cuda, "Event", self._new_event)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: self.current)
        monkeypatch.setattr(torch.accelerator, "set_stream", self._set_stream)
        monkeypatch.setattr(torch.accelerator, "set_device_index", self._set_device)

    @property
    def current(self) -> FakeStream:
        """Current stream of this thread; 0: the compute stream."""
        return getattr(self._thread, "stream", FakeStream(self.device, 0))

    @property
    def current_device(self) -> torch.device:
        return getattr(self._thread, "device", torch.device(self.device.type, 0))

    def _new_stream(self, device: torch.device) -> FakeStream:
        self._streams += 1
        return FakeStream(device, self._streams)

    def _new_event(self, device: torch.device | None = None, **arguments: Any) -> FakeEvent:
        return FakeEvent({"device": device, **arguments})

    def _set_stream(self, stream: FakeStream) -> None:
        self._thread.stream = stream

    def _set_device(self, device: torch.device) -> None:
        self._thread.device = device
