"""The engine on an emulated machine: no access to memory races with another, on streams, threads and networks."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.depth import DEPTH
from tests.unit.trainer.engine.races.support.machine import COPIES, Call
from tests.unit.trainer.engine.races.support.recording import RecordingMachine
from tests.unit.trainer.engine.races.support.scenario import TrainedCase, run
from tests.unit.trainer.engine.races.support.scenarios import SCENARIOS
from tests.unit.trainer.engine.races.support.sites import engine_frame
from tests.unit.trainer.engine.support import reference
from tests.unit.trainer.engine.support.cases import Case

SAMPLE = (
    *("all homes, clipped by unit", "offloaded activations, 1F1B", "groups of experts on disk"),
    *("shards in all homes", "a block on two stages", "groups over ranks", "balanced by step", "replicas of shards"),
    *("1F1B, on CPUs", "replicas of shards, on CPUs"),
)


@pytest.mark.parametrize("name", DEPTH.of(SAMPLE, tuple(SCENARIOS)))
def test_the_engine_has_no_race(name: str, tmp_path: Path) -> None:
    assert run(SCENARIOS[name], tmp_path).races == []


@pytest.mark.parametrize(
    "case", [Case(layers=2, homes="dh"), Case(layers=2, data=2, sharding="Full"), Case(layers=2, pipeline=2)]
)
def test_emulated_ranks_compute_the_losses_of_the_plain_loop(case: Case, tmp_path: Path) -> None:
    losses, _ = reference.train(case)
    outcome = run(TrainedCase(case), tmp_path)
    for of_rank in outcome.numbers:
        assert of_rank.losses == pytest.approx(losses[: len(of_rank.losses)], rel=1e-12)
        assert of_rank.losses


@pytest.mark.parametrize("name", ["all homes, clipped by unit", "rounded gradients of shards"])
def test_state_and_tokens_cross_the_bus_through_pinned_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of pageable memory would make its thread wait, and take a detour through a buffer of the driver. Only the
    state before the first step and sums of a few numbers are copied so."""
    perform, crossing = RecordingMachine.perform, dict[str, set[str]]()

    def noted(machine: RecordingMachine, call: Call) -> Any:
        places = {machine.place_of(tensor) for tensor in call.inputs}
        frame = engine_frame()
        if call.name in COPIES and "device" in places and frame is not None:
            crossing.setdefault(frame.f_code.co_qualname.partition(".<")[0], set()).update(
                map(str, places - {"device"})
            )
        return perform(machine, call)

    monkeypatch.setattr(RecordingMachine, "perform", noted)
    run(SCENARIOS[name], tmp_path)
    assert {function for function, places in crossing.items() if "pageable" in places} <= {"put", "sums_of"}
    fetches = {"Copies._start_fetch", "Copies._gather"} & {one for one, places in crossing.items() if places}
    gradients = {"MemoryState.keep_gradient", "DiskState.keep_gradient"}
    assert fetches
    assert all(crossing[function] == {"pinned"} for function in (*fetches, *gradients, "TokenBuffer.to_device"))
