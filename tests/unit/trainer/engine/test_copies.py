"""Weights can be read only while their working copy exists and is complete."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.engine.copies import Copies, NotResident
from pseudoreal_trainer.engine.ranks.process_groups import ProcessGroups
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.engine.ranks.streams import Streams
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.state.memory import AdamW, MemoryState, Shard, Vectors
from pseudoreal_trainer.engine.state.pinned import BounceBuffers
from pseudoreal_trainer.engine.state.store import NewestUpdates
from pseudoreal_trainer.model.modules import Modules
from pseudoreal_trainer.plan.records import Drop, Fetch, Read
from pseudoreal_trainer.plan.units import units_of
from pseudoreal_trainer.plan.update_ranges import UpdateRange
from pseudoreal_trainer.runtime.heartbeat import Heartbeat
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tests.unit.trainer.engine.support.cases import Case
from tests.unit.trainer.engine.support.recorded import RecordedStreams

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Window:
    """A window of some slots over two blocks on the host; the weights of one are all 1, of the other all 2."""

    copies: Copies
    updates: NewestUpdates
    modules: Modules
    trace: Trace


@pytest.fixture
def window(tmp_path: Path) -> Window:
    return _make_window(1, tmp_path)


@pytest.fixture
def window_of_two(tmp_path: Path) -> Window:
    return _make_window(2, tmp_path)


def _make_window(size: int, folder: Path) -> Window:
    case = Case(layers=2, homes="h", window=size)
    units = units_of(case.model, Sharing(blocks=2))
    trace, streams, groups = Trace(0, folder), Streams(CPU), ProcessGroups(case.layout, Ranks(0, 1, CPU))
    states = {unit: _make_host_state(units[unit].numel, float(unit)) for unit in (1, 2)}
    slots = [torch.zeros(units[1].numel, dtype=torch.float64) for _ in range(size)]
    modules = Modules(case.model, units, torch.float64, compiled=False)
    store = _make_store(states, window=slots)
    return Window(Copies(store, groups, streams, trace), store.updates, modules, trace)


def test_a_resident_copy_waits_for_the_update_of_the_previous_step(tmp_path: Path) -> None:
    case = Case(layers=1)
    units = units_of(case.model, Sharing(blocks=1))
    states, weights = {1: _make_host_state(units[1].numel, 1.0)}, torch.zeros(units[1].numel, dtype=torch.float64)
    groups, store = ProcessGroups(case.layout, Ranks(0, 1, CPU)), _make_store(states, resident={1: weights})
    copies = Copies(store, groups, Streams(CPU), Trace(0, tmp_path))
    module = Modules(case.model, units, torch.float64, compiled=False).of(1)
    failed: Future[Any] = Future()
    failed.set_exception(OSError("the disk is gone"))
    store.updates.replace(1, failed)
    with pytest.raises(OSError, match="the disk is gone"):
        copies.bind(1, module)


def test_a_fetch_reuses_shard_memory_after_the_newest_drop_in_any_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard dropped last is of the other pool, and the allocator reuses its memory first."""
    streams, pools = RecordedStreams(), {1: "Blocks", 2: "Experts", 3: "Blocks"}
    monkeypatch.setattr(Copies, "_gather", lambda *_: None)
    layout = Mock(pool_of=pools.__getitem__, moves=lambda _: True, is_common=lambda _: False, shards=lambda _: 2)
    groups = Mock(layout=layout, ranks=Mock(heartbeat=Heartbeat()))
    store = _make_store({unit: _make_host_state(4, 1.0) for unit in pools})
    store.window = {pool: [torch.zeros(8)] for pool in ("Blocks", "Experts")}
    copies = Copies(store, groups, streams, Trace(0))
    for unit in (1, 2):
        copies.fetch(Fetch(unit))
    for unit in (1, 2):
        copies.drop(Drop(unit))
    newest = streams.log[-1]
    assert newest[0] == "record_event"
    copies.fetch(Fetch(3))
    assert ("wait_event", newest[1]) in streams.log


def _make_store(
    states: dict[int, MemoryState], *, resident: Mapping[int, Tensor] | None = None, window: Sequence[Tensor] = ()
) -> Any:
    updates = NewestUpdates(states)
    return SimpleNamespace(states=states, updates=updates, resident=resident or {}, window={"Blocks": window})


def _make_host_state(numel: int, value: float) -> MemoryState:
    shard = Shard(0, numel, (UpdateRange(0, numel),), torch.float64, torch.float64, torch.float64)
    weights = torch.full((numel,), value, dtype=torch.float64)
    return MemoryState(shard, Vectors(weights, weights, torch.zeros_like(weights)), AdamW(), BounceBuffers([]))


def test_weights_can_be_read_between_fetch_and_drop_only(window: Window) -> None:
    copies, module = window.copies, window.modules.of(1)
    with pytest.raises(NotResident, match="unit 1 has no working copy"):
        copies.flat(1)
    copies.fetch(Fetch(1))
    with pytest.raises(NotResident, match="unit 1 is being fetched"):
        copies.flat(1)
    copies.bind(1, module)
    assert _all_are(copies.flat(1), 1.0)
    copies.drop(Drop(1))
    with pytest.raises(NotResident, match="unit 1 has no working copy"):
        copies.bind(1, module)


def test_a_module_is_bound_to_the_unit_that_occupies_the_slot(window: Window) -> None:
    copies, module = window.copies, window.modules.of(1)
    for unit in (1, 2, 1):
        copies.fetch(Fetch(unit))
        copies.bind(unit, module)
        assert all(_all_are(parameter, float(unit)) for parameter in module.parameters)
        copies.drop(Drop(unit))


def test_autograd_reads_saved_weights_from_the_current_working_copy(window: Window) -> None:
    """A graph made with one working copy runs backward with the next working copy of the same unit."""
    copies, module = window.copies, window.modules.of(1)
    copies.fetch(Fetch(1))
    copies.bind(1, module)
    source = torch.ones(1, 2, 8, dtype=torch.float64, requires_grad=True)
    with copies.saving():
        output = window.modules.block(source, 0)
    copies.drop(Drop(1))
    with pytest.raises(NotResident, match="unit 1 has no working copy"):
        torch.autograd.grad(output.sum(), module.parameters, retain_graph=True)
    copies.fetch(Fetch(1))
    copies.bind(1, module)
    gradients = torch.autograd.grad(output.sum(), module.parameters)
    assert any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize(
    ("slots", "keep", "sees_tensors"), [(0, "All", True), (0, "Products", False), (1, "All", False)]
)
def test_autograd_saves_tensors_itself_if_no_unit_is_streamed_and_none_is_recomputed(
    slots: int, keep: Any, sees_tensors: bool
) -> None:
    """Of two contexts of hooks, torch uses the inner one: the outer one sees tensors only if `saving` has no hooks."""
    seen: list[Tensor] = []

    def see(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    store = _make_store({1: _make_host_state(4, 1.0)}, window=[torch.zeros(4)] * slots)
    groups = ProcessGroups(Case(layers=1, keep=keep).layout, Ranks(0, 1, CPU))
    copies = Copies(store, groups, Streams(CPU), Trace(0))
    source = torch.ones(2, requires_grad=True)
    with saved_tensors_hooks(see, lambda tensor: tensor), copies.saving():
        source.exp()
    assert bool(seen) is sees_tensors


def test_a_fetch_waits_for_the_units_update(window: Window) -> None:
    """The fetch also raises the error of a failed update."""
    failed: Future[Any] = Future()
    failed.set_exception(OSError("the disk is gone"))
    window.updates.replace(1, failed)
    with pytest.raises(OSError, match="the disk is gone"):
        window.copies.fetch(Fetch(1))
    with pytest.raises(OSError, match="the disk is gone"):
        window.updates.wait()


def _all_are(tensor: Tensor, value: float) -> bool:
    return bool((tensor == value).all())


def test_a_pending_fetch_does_not_delay_passes_of_other_units(window_of_two: Window) -> None:
    copies, module, updating = window_of_two.copies, window_of_two.modules.of(1), Future[Any]()
    window_of_two.updates.replace(2, updating)
    copies.fetch(Fetch(1))
    copies.fetch(Fetch(2))
    copies.bind(1, module)
    with pytest.raises(NotResident, match="unit 2"):
        copies.flat(2)
    updating.set_result(None)
    copies.start_ready()
    copies.bind(2, module)
    assert _all_are(copies.flat(2), 2.0)


def test_fetches_start_in_plan_order(window_of_two: Window) -> None:
    """The other data ranks start fetches in the same order, although their units may be ready at other times."""
    copies, updating = window_of_two.copies, Future[Any]()
    window_of_two.updates.replace(1, updating)
    copies.fetch(Fetch(1))
    copies.fetch(Fetch(2))
    with pytest.raises(NotResident, match="unit 2 has no working copy"):
        copies.flat(2)
    updating.set_result(None)
    copies.start_all()
    for unit in (1, 2):
        with pytest.raises(NotResident, match=f"unit {unit} is being fetched"):
            copies.flat(unit)
    begun = [event["args"]["unit"] for event in window_of_two.trace.events if event["name"] == "Fetch"]
    assert begun == sorted(begun)


def test_a_unit_is_not_read_from_disk_during_its_update(window_of_two: Window) -> None:
    """The update itself needs the threads of the disk."""
    copies, updating = window_of_two.copies, Future[Any]()
    state = Mock(wraps=copies._store.states[1])
    copies._store.states[1] = state
    window_of_two.updates.replace(1, updating)
    copies.read(Read(1))
    copies.start_ready()
    state.read_ahead.assert_not_called()
    updating.set_result(None)
    state.read_ahead = Mock()
    copies.start_ready()
    state.read_ahead.assert_called_once_with(updating)
