"""Every thread that launches work on the device, or waits for it, has made the rank's device its own.

In any other thread the current device is the first one of the machine, and the first call makes a context there: some
hundred MB of the first rank's device, from each other rank.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pseudoreal_trainer.engine import engine as engine_module
from pseudoreal_trainer.engine.passes import Training
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.engine.ranks.streams import Stream

from tests.unit.trainer.engine.support.cases import RATE, Case
from tests.unit.trainer.engine.support.recorded import RecordedEvent, RecordedStreams
from tests.unit.trainer.engine.support.running import CaseBatch, captured, make_engine

CPU = torch.device("cpu")


class EnteredStreams(RecordedStreams):
    """Streams that note the threads that use them, and which of these have called `enter_thread`."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = {threading.get_ident()}
        self.used: dict[int, str] = {}
        """Thread -> its name."""

    def enter_thread(self) -> None:
        self.entered.add(threading.get_ident())

    def use(self) -> None:
        self.used[threading.get_ident()] = threading.current_thread().name

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.use()
        with super().on(stream):
            yield

    def record_event(self) -> Any:
        self.use()
        return super().record_event()

    def wait_event(self, event: Any) -> None:
        self.use()
        super().wait_event(event)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> EnteredStreams:
    found = EnteredStreams()
    synchronize = RecordedEvent.synchronize

    def noted(event: RecordedEvent) -> None:
        found.use()
        synchronize(event)

    monkeypatch.setattr(RecordedEvent, "synchronize", noted)
    monkeypatch.setattr(engine_module, "Streams", lambda _: found)
    return found


@pytest.mark.parametrize("case", [Case(homes="D"), Case(homes="h", stash=True), Case(clipping="PerUnit")], ids=str)
def test_every_thread_that_uses_the_device_has_entered(case: Case, streams: EnteredStreams, tmp_path: Path) -> None:
    engine = make_engine(case, Ranks(0, 1, CPU), tmp_path)
    for step in range(2):
        engine.train(CaseBatch(case, step, 0, CPU), Training(96, RATE, stop=False), step)
    captured(engine)
    engine.close()
    assert [name for thread, name in streams.used.items() if thread not in streams.entered] == []
    names = {name.split("_")[0] for name in streams.used.values()}
    assert names > {"reductions", "updates", "capture"}
    assert "disk" in names or case.homes != "D"
