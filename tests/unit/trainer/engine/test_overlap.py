"""Copies to the device, updates, and copies to a home are under way for different units at the same time."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pseudoreal_trainer.engine.copies import Copies
from pseudoreal_trainer.engine.gradients import Gradients
from pseudoreal_trainer.engine.passes import Training
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.engine.state.disk import DiskState
from pseudoreal_trainer.engine.state.memory import MemoryState

from tests.unit.trainer.engine.support.cases import RATE, Case
from tests.unit.trainer.engine.support.running import CaseBatch, make_engine

CPU, PATIENCE = torch.device("cpu"), 60.0
UPDATED, KEPT, FETCHED = 6, 5, 3
"""Units of the backward pass of six layers, with a window of two: while the block of layer 6 is updated, the gradient
of layer 5 goes to its home, and the weights of layer 3 come to the device, for the pass after the next."""


class _Meeting:
    """Place at which three calls for three units wait for each other: it ends only if all are under way."""

    def __init__(self) -> None:
        self.is_open = False
        self.met: set[int] = set()
        self._barrier = threading.Barrier(3)

    def attended(self, call: Callable[..., Any], unit_of: Callable[..., int], unit: int) -> Callable[..., Any]:
        """Return the call, which first waits for the others if it is for this unit and the meeting is open."""

        def attend(*args: Any, **kwargs: Any) -> Any:
            if self.is_open and unit not in self.met and unit_of(*args) == unit:
                self.met.add(unit)
                self._barrier.wait(PATIENCE)
            return call(*args, **kwargs)

        return attend


@pytest.mark.parametrize(
    "case",
    [
        *(Case(homes=home, layers=6, clipping="PerUnit") for home in "hD"),
        Case(homes="h", layers=6, gradients="BFloat16", precision="bfloat16"),
        Case(homes="h", layers=6, clipping="Global", norm="100", speculates=True),
    ],
    ids=lambda case: case.name,
)
def test_three_units_are_copied_and_updated_at_the_same_time(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting, engine = _Meeting(), make_engine(case, Ranks(0, 1, CPU), tmp_path)
    units = {id(state): unit for unit, state in engine.state._store.states.items()}
    kind = DiskState if case.homes == "D" else MemoryState
    launch = Gradients.launch_reduction

    def launched(self: Gradients, unit: int) -> Any:
        meeting.is_open |= step == 1 and unit == UPDATED
        return launch(self, unit)

    monkeypatch.setattr(Gradients, "launch_reduction", launched)
    for owner, name, unit_of, unit in (
        (kind, "speculate" if case.speculates else "update", lambda state, *_: units[id(state)], UPDATED),
        (kind, "keep_gradient", lambda state, *_: units[id(state)], KEPT),
        (Copies, "_start_fetch", lambda _, record: record.unit, FETCHED),
    ):
        monkeypatch.setattr(owner, name, meeting.attended(getattr(owner, name), unit_of, unit))
    for step in range(2):
        engine.train(CaseBatch(case, step, 0, CPU), Training(100, RATE, stop=False), step)
        engine.state.wait_for_updates()
    assert meeting.met == {UPDATED, KEPT, FETCHED}
    engine.close()
