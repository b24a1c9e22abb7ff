"""Work of the main thread while units are still being updated."""

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from pseudoreal_trainer.engine.gradients import ReductionThread
from pseudoreal_trainer.engine.passes import Passes, PlanRun, Training
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.plan.records import Forward

from tests.unit.trainer.engine.support.cases import RATE, Case
from tests.unit.trainer.engine.support.running import CaseBatch, make_engine

CPU = torch.device("cpu")
SECONDS = 300
HELD = 2
"""Unit of the second layer."""


@pytest.mark.parametrize("homes", ["h", "D"])
def test_passes_of_a_present_unit_do_not_wait_for_the_update_of_the_next_unit(
    homes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(homes=homes, window=2, clipping="Global", micro_batches=2)
    engine, gate = make_engine(case, Ranks(0, 1, CPU), tmp_path), Future[None]()
    passes: list[Forward] = []
    act = Passes.forward

    def forward(self: Passes, run: PlanRun, step: Forward) -> None:
        act(self, run, step)
        passes.append(step)
        # The last one before the unit is needed.
        if step == Forward(HELD - 1, case.micro_batches - 1) and len(passes) > first:
            gate.set_result(None)

    monkeypatch.setattr(Passes, "forward", forward)
    first = case.layers * case.micro_batches + case.micro_batches
    engine._executor.updates.wait_for_captures({HELD: gate})

    def train_two_steps() -> None:
        for step in range(2):
            _train_step(engine, case, step)

    train = threading.Thread(target=train_two_steps, daemon=True)
    train.start()
    train.join(SECONDS)
    assert gate.done(), f"the main thread waits for the update of unit {HELD}, after {passes[first:]}"
    assert not train.is_alive()
    engine.close()


def _train_step(engine: Any, case: Case, step: int) -> None:
    engine.train(CaseBatch(case, step, 0, CPU), Training(96, RATE, stop=False), step)


def test_an_update_after_a_skipped_one_waits_for_the_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A skipped update leaves the state as it is, and does not wait; the next update would change what is captured."""
    case = Case(homes="h", clipping="Global")
    engine, gate = make_engine(case, Ranks(0, 1, CPU), tmp_path), Future[None]()
    engine._executor.updates.wait_for_captures({HELD: gate})
    with monkeypatch.context() as skipping:
        skipping.setattr(ReductionThread, "_update_terms", lambda *_: None)
        _train_step(engine, case, 0)
        engine.state.wait_for_updates()
    _train_step(engine, case, 1)
    updates = engine.state._store.updates
    updates.of(HELD - 1).result(SECONDS)
    with pytest.raises(TimeoutError):
        updates.of(HELD).result(0.5)
    gate.set_result(None)
    updates.of(HELD).result(SECONDS)
    engine.close()
