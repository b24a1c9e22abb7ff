"""Updates that start before the norm is known end with the same bits as updates that wait for the norm.

Whether an update has started when the ranks agree depends on the threads' times. Tests with one rank speculate on every
unit, even after the agreement; tests with several ranks leave it to the threads.
"""

import json
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.gradients import ReductionThread
from pseudoreal_trainer.engine.passes import Training
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.engine.state.memory import MemoryState

from tests.unit.trainer.engine.support.cases import EIGHT_IN_BALANCE, RATE, WIDE, Case
from tests.unit.trainer.engine.support.running import CaseBatch, Result, make_engine, run_case, want
from tests.unit.trainer.engine.test_idle_experts import MANY

CPU = torch.device("cpu")
SECONDS = 300
NEVER = "100"
MIXED = {("", "float64"): "1.3", ("", "bfloat16"): "1.3", (MANY, "float64"): "1.1", (MANY, "bfloat16"): "1.05"}
MIXED[EIGHT_IN_BALANCE, "bfloat16"] = "1.2"
MANY_IN_WIDE = json.dumps(json.loads(WIDE) | json.loads(MANY))
MIXED |= {(WIDE, "bfloat16"): "1.38", (MANY_IN_WIDE, "bfloat16"): "1.2"}
"""Model and precision -> norm that some of the steps exceed, one of them after a step that does not."""
IDLE: dict[str, Any] = {"drawn": MANY, "idle": "Skip"}
ALONE = [
    *(Case(homes=homes, precision=p) for homes in ("h", "hdD") for p in ("float64", "bfloat16")),
    Case(homes="h", order="1F1B"),
    Case(homes="h", **IDLE),
    Case(homes="h", precision="bfloat16", expert_groups=4, window=1, **IDLE),
    Case(homes="h", drawn=EIGHT_IN_BALANCE, precision="bfloat16"),
    Case(homes="hD", precision="bfloat16", moments="BFloat16"),
    Case(homes="h", drawn=EIGHT_IN_BALANCE, precision="bfloat16", moments="BFloat16"),
    Case(homes="hD", drawn=WIDE, precision="bfloat16", moments="Float8"),
    Case(homes="hD", precision="bfloat16", gradients="BFloat16"),
    Case(homes="h", drawn=MANY_IN_WIDE, precision="bfloat16", moments="Float8", idle="Skip"),
]
TOGETHER = [
    *(Case(data=2, sharding=sharding, homes="hd") for sharding in ("None", "Full")),
    Case(data=2, sharding="Full", precision="bfloat16", expert_ranks=2, homes="h", **IDLE),
    Case(pipeline=2, order="1F1B", homes="h", stash=True),
    Case(pipeline=2, blocks=1, homes="h"),
    Case(data=2, sharding="Full", homes="h", precision="bfloat16", moments="BFloat16"),
    Case(data=2, sharding="Full", homes="h", drawn=WIDE, precision="bfloat16", moments="Float8"),
]


def _waiting(case: Case, norm: str) -> Case:
    return replace(case, steps=5, clipping="Global", norm=norm)


def _speculating(case: Case, norm: str) -> Case:
    return replace(_waiting(case, norm), speculates=True)


want(
    one
    for case in TOGETHER
    for norm in (MIXED[case.drawn, case.precision], NEVER)
    for one in (_waiting(case, norm), _speculating(case, norm))
)


class _Log:
    def __init__(self) -> None:
        self.speculated = self.undone = self.restored = 0


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> _Log:
    """Speculate whenever the step before was not clipped, and count."""
    agree = ReductionThread._agree

    def stay_open(self: ReductionThread, *arguments: Any) -> Any:
        was_open = self._open.may_speculate
        agreed = agree(self, *arguments)
        self._open.may_speculate = was_open
        return agreed

    monkeypatch.setattr(ReductionThread, "_agree", stay_open)
    found = _Log()
    speculate, undo, restore = MemoryState.speculate, MemoryState._undo, MemoryState._restore

    def count_speculation(self: MemoryState, *arguments: Any) -> None:
        found.speculated += 1
        speculate(self, *arguments)

    def count_undone(self: MemoryState) -> None:
        found.undone += self._is_speculative
        undo(self)

    def count_restored(self: MemoryState, parts: Any) -> None:
        found.restored += len(parts) > 0
        restore(self, parts)

    monkeypatch.setattr(MemoryState, "speculate", count_speculation)
    monkeypatch.setattr(MemoryState, "_undo", count_undone)
    monkeypatch.setattr(MemoryState, "_restore", count_restored)
    return found


def _assert_same_bits(found: Result, expected: Result) -> None:
    assert found.losses == expected.losses
    assert found.evaluation == expected.evaluation
    for kind, parts in expected.captured.items():
        for unit, (_, part) in parts.items():
            assert found.captured[kind][unit][1].equal(part), f"{kind} of unit {unit}"


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.name)
@pytest.mark.parametrize("is_mixed", [True, False], ids=["some steps are clipped", "no step is clipped"])
def test_speculative_updates_end_with_the_same_bits(case: Case, is_mixed: bool, tmp_path: Path, log: _Log) -> None:
    norm = MIXED[case.drawn, case.precision] if is_mixed else NEVER
    ranks = Ranks(0, 1, torch.device("cpu"))
    expected = run_case(_waiting(case, norm), ranks, tmp_path)
    assert not log.speculated
    found = run_case(_speculating(case, norm), ranks, tmp_path)
    _assert_same_bits(found, expected)
    assert log.speculated > 0
    assert (log.undone > 0) == is_mixed
    if case.idle == "Skip":
        assert log.restored > log.undone, "idle experts are restored"


@pytest.mark.parametrize("case", TOGETHER, ids=lambda case: case.name)
@pytest.mark.parametrize("is_mixed", [True, False], ids=["some steps are clipped", "no step is clipped"])
def test_speculative_updates_of_several_ranks_end_with_the_same_bits(
    case: Case, is_mixed: bool, engine_results: dict[Case, list[Result]]
) -> None:
    norm = MIXED[case.drawn, case.precision] if is_mixed else NEVER
    found, expected = (engine_results[of(case, norm)] for of in (_speculating, _waiting))
    for rank, waiting in zip(found, expected, strict=True):
        _assert_same_bits(rank, waiting)


def _unclipped_steps(engine: Engine, case: Case, steps: int) -> None:
    """Train steps one after the other, without waiting for their updates in between."""
    for step in range(steps):
        engine.train(CaseBatch(case, step, 0, CPU), Training(96, RATE, stop=False), step)


def test_updates_that_are_late_for_the_agreement_do_not_speculate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first speculation of the second step lasts until all ranks have agreed on the step, and the third step has
    begun. What is left then has a better order as updates."""
    case = _speculating(Case(homes="h"), NEVER)
    engine, calls, gate = make_engine(case, Ranks(0, 1, CPU), tmp_path), list[MemoryState](), threading.Event()
    speculate = MemoryState.speculate

    def hold(self: MemoryState, *arguments: Any) -> None:
        calls.append(self)
        assert gate.wait(SECONDS)
        speculate(self, *arguments)

    monkeypatch.setattr(MemoryState, "speculate", hold)
    _unclipped_steps(engine, case, 2)
    engine._executor._reductions.begin_step(2)
    engine._executor._reductions._thread.submit(lambda: None).result(SECONDS)
    gate.set()
    engine.state.wait_for_updates()
    engine.close()
    assert len(calls) == 1


def test_no_update_speculates_before_the_first_norm_is_known_or_after_a_clipped_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[MemoryState] = []
    monkeypatch.setattr(MemoryState, "speculate", lambda self, *_: calls.append(self))
    for case, steps in ((_speculating(Case(homes="h"), NEVER), 1), (_speculating(Case(homes="h"), "1e-6"), 3)):
        engine = make_engine(case, Ranks(0, 1, CPU), tmp_path)
        _unclipped_steps(engine, case, steps)
        engine.state.wait_for_updates()
        engine.close()
    assert not calls


def test_a_unit_that_is_captured_does_not_speculate_and_does_not_hold_up_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = _speculating(Case(homes="h"), NEVER)
    engine, calls, gate = make_engine(case, Ranks(0, 1, CPU), tmp_path), list[MemoryState](), Future[None]()
    monkeypatch.setattr(MemoryState, "speculate", lambda self, *_: calls.append(self))
    captured = case.layout.units - 2
    _unclipped_steps(engine, case, 1)
    engine._executor.updates.wait_for_captures({captured: gate})
    engine.train(CaseBatch(case, 1, 0, CPU), Training(96, RATE, stop=False), 1)
    updates, states = engine.state._store.updates, engine.state._store.states
    updates.of(0).result(SECONDS)
    assert states[captured] not in calls
    gate.set_result(None)
    engine.state.wait_for_updates()
    engine.close()


def test_the_state_before_an_update_is_kept_for_units_in_host_memory_alone() -> None:
    case = Case(homes="hdD")
    layout = _speculating(case, NEVER).layout
    speculative = [unit for unit in range(layout.units) if layout.is_speculative(unit)]
    assert speculative == [unit for unit in range(layout.units) if layout.home(unit) == "Host"]
    assert not any(map(_waiting(case, NEVER).layout.is_speculative, range(layout.units)))
    assert not any(map(replace(case, speculates=True, clipping="PerUnit").layout.is_speculative, range(layout.units)))
