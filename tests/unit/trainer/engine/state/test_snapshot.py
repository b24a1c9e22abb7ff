"""Snapshot of a step's state while training continues."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from pseudoreal_trainer.checkpoint.pieces import spans_of
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.passes import Training
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.plan.units import KINDS, Kind
from torch import Tensor

from tests.unit.trainer.engine.support.cases import RATE, Case
from tests.unit.trainer.engine.support.reference import batch_of
from tests.unit.trainer.engine.support.running import CaseBatch, captured, make_engine

LATER = 10
"""Steps during which the sink is slow."""
DEADLINE = 300.0


@dataclass
class _SlowSink:
    """Sink that takes nothing until `go` is set."""

    go: threading.Event = field(default_factory=threading.Event)
    streams: dict[Kind, list[Tensor]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def write(self, kind: Kind, content: Tensor) -> None:
        assert self.go.wait(DEADLINE)
        self.streams[kind].append(content.clone())

    def flat(self, kind: Kind) -> Tensor:
        return torch.cat(self.streams[kind])


@pytest.fixture(params=["d", "h", "D", "dhD"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    torch.set_num_threads(1)
    case = Case(homes=request.param, clipping="PerUnit", micro_batches=2)
    found = make_engine(case, Ranks(0, 1, torch.device("cpu")), tmp_path)
    found.case = case  # type: ignore[attr-defined]
    yield found
    found.close()


def _train(engine: Engine, step: int) -> None:
    case: Case = engine.case  # type: ignore[attr-defined]
    batch = CaseBatch(case, step % 5, 0, torch.device("cpu"))
    engine.train(batch, Training(batch_of(case, 0)[:, :, 1:].numel(), RATE, stop=False), step)


def _state(engine: Engine) -> dict[Kind, Tensor]:
    found = captured(engine)
    order = engine.order_of_updates()
    return {kind: torch.cat([parts[unit][1] for unit in order]) for kind, parts in found.items()}


def _start_snapshot(engine: Engine, sink: Any, buffer_bytes: int) -> Any:
    spans = spans_of(engine.groups.layout, engine.units, 0)
    return engine.state.capture({unit: spans[unit] for unit in engine.order_of_updates()}, sink, buffer_bytes)


def test_snapshot_has_the_state_of_its_step_while_training_continues(engine: Engine) -> None:
    """With room for the whole state, training never waits for the sink."""
    for step in (1, 2):
        _train(engine, step)
    expected = _state(engine)
    sink = _SlowSink()
    done = _start_snapshot(engine, sink, buffer_bytes=1 << 20)
    for step in range(3, 3 + LATER):
        _train(engine, step)
    engine.state.wait_for_updates()
    assert not done.done()
    sink.go.set()
    done.result(DEADLINE)
    now = _state(engine)
    for kind in KINDS:
        assert torch.equal(sink.flat(kind), expected[kind]), kind
        assert not torch.equal(now[kind], expected[kind]), "training went on"


def test_training_waits_for_a_small_snapshot_buffer_and_the_snapshot_is_correct(engine: Engine) -> None:
    for step in (1, 2):
        _train(engine, step)
    expected = _state(engine)
    sink = _SlowSink()
    done = _start_snapshot(engine, sink, buffer_bytes=512)

    def later_steps() -> None:
        for step in range(3, 3 + LATER):
            _train(engine, step)

    ahead = threading.Thread(target=later_steps)
    ahead.start()
    ahead.join(0.5)
    assert ahead.is_alive(), "an update waits for its unit's capture"
    sink.go.set()
    ahead.join(DEADLINE)
    done.result(DEADLINE)
    for kind in KINDS:
        assert torch.equal(sink.flat(kind), expected[kind]), kind
    assert engine.state.capture_wait_seconds > 0


class _FailingSink:
    def write(self, kind: Kind, content: Tensor) -> None:  # noqa: ARG002
        raise OSError(28, "No space left on device")


def test_a_failed_sink_does_not_stop_training(engine: Engine) -> None:
    _train(engine, 1)
    done = _start_snapshot(engine, _FailingSink(), buffer_bytes=512)
    for step in range(2, 5):
        _train(engine, step)
    engine.state.wait_for_updates()
    with pytest.raises(OSError, match="No space left"):
        done.result(DEADLINE)


def _remove_capture_barriers(engine: Engine) -> None:
    engine._executor.updates._captures.clear()


def test_snapshot_without_capture_barriers_would_mix_steps(engine: Engine) -> None:
    """The defect that the tests above would find: an update that does not wait for the capture."""
    _train(engine, 1)
    expected = _state(engine)
    sink = _SlowSink()
    done = _start_snapshot(engine, sink, buffer_bytes=512)
    _remove_capture_barriers(engine)
    for step in range(2, 5):
        _train(engine, step)
    engine.state.wait_for_updates()
    sink.go.set()
    done.result(DEADLINE)
    assert any(not torch.equal(sink.flat(kind), expected[kind]) for kind in KINDS)
