"""The pinned arena of an engine, without a GPU: its size, its content, and its end."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pseudoreal_trainer.checkpoint.pieces import spans_of
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.passes import TokenBuffer, Training
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.engine.state.memory import MemoryState
from pseudoreal_trainer.engine.state.pinned import (
    Block,
    BounceBuffers,
    PinnedArena,
    PinnedMemory,
    PlainMemory,
    allocator_for,
)
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.plan.lower import step_plan
from pseudoreal_trainer.plan.memory.activations import activation_peak
from pseudoreal_trainer.plan.memory.pinned_arena import arena_layout
from pseudoreal_trainer.plan.memory.tiers import resident_bytes
from pseudoreal_trainer.plan.units import Kind
from torch import Tensor

from tests.unit.trainer.engine.state.support.fake_memory import FakeMemory, pretend_gpu
from tests.unit.trainer.engine.support.cases import RATE, Case
from tests.unit.trainer.engine.support.recorded import RecordedStreams
from tests.unit.trainer.engine.support.running import CaseBatch, make_engine
from tests.unit.trainer.plan.memory.support.large_model import PARAMETERS, SIZES, TOKENS, layout
from tests.unit.trainer.plan.memory.support.sizes_of_case import sizes_of

CPU = torch.device("cpu")


def test_pinned_arena_of_6_5_billion_parameters_is_one_allocation_of_the_planned_size() -> None:
    planned, fake = arena_layout(layout("Host"), SIZES, 0), FakeMemory()
    region = PinnedArena(planned, fake)
    vectors = [region.vector("weights", unit, torch.bfloat16) for unit in range(len(SIZES.units))]
    vectors += [region.vector("gradient", unit, torch.float32) for unit in range(len(SIZES.units))]
    assert fake.asked == [6 * PARAMETERS]
    assert resident_bytes(layout("Host"), SIZES, 0).pinned == 6 * PARAMETERS + TOKENS
    assert sum(vector.nbytes for vector in vectors) == fake.asked[0]
    assert [len(vector) for vector in vectors] == 2 * [unit.numel for unit in SIZES.units]


ENGINES = [
    Case(precision="bfloat16", homes="h", clipping="Global"),
    Case(precision="bfloat16", homes="hDd", clipping="PerUnit"),
    Case(precision="float32", homes="hD", clipping="None", window=1),
    Case(precision="float32", homes="d"),
    Case(precision="bfloat16", homes="h", clipping="Global", stash=True, micro_batches=3),
    Case(precision="bfloat16", homes="d", clipping="PerUnit", stash=True, order="1F1B", micro_batches=5),
    Case(precision="float32", homes="Dd", stash=True, order="GPipe"),
]
RING = 1000
"""Bytes: no multiple of a page, and less than a unit."""


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> FakeMemory:
    return pretend_gpu(monkeypatch)


def train(engine: Engine, case: Case, steps: int = 2) -> list[float]:
    """Return the losses of some training steps."""
    batch = CaseBatch(case, 0, 0, CPU)
    losses = [engine.train(batch, Training(100, RATE, stop=False), step + 1).loss_sum for step in range(steps)]
    engine.state.wait_for_updates()
    return losses


class _Nowhere:
    def write(self, kind: Kind, content: Tensor) -> None:
        pass


def save_while_it_trains(engine: Engine, case: Case) -> None:
    saved = engine.state.capture(spans_of(case.layout, engine.units, 0), _Nowhere(), RING)
    train(engine, case)
    saved.result()


@pytest.mark.parametrize("case", ENGINES, ids=lambda case: case.name)
def test_engine_pins_exactly_the_planned_bytes(case: Case, memory: FakeMemory, tmp_path: Path) -> None:
    engine = make_engine(case, Ranks(0, 1, CPU), tmp_path)
    region = arena_layout(case.layout, sizes_of(case), 0).size
    assert memory.pinned == engine.state.memory_report().pinned_arena == region
    train(engine, case)
    sizes = replace(sizes_of(case), device="accelerator")
    peak = activation_peak(case.layout, sizes, 0, step_plan(case.layout)[0])
    assert memory.pinned == (resident_bytes(case.layout, sizes, 0) + peak).pinned
    tokens = 8 * case.micro_batches * 4 * 7
    asked = [size for size in (region, tokens, peak.host) if size]
    assert memory.asked == asked
    assert (peak.host > 0) == case.stash
    save_while_it_trains(engine, case)
    engine.evaluate(CaseBatch(case, 0, 0, CPU), case.micro_batches)
    saving = replace(sizes, checkpoint_buffer=RING)
    assert (
        memory.pinned == engine.state.memory_report().pinned == (resident_bytes(case.layout, saving, 0) + peak).pinned
    )
    assert memory.asked == asked + [RING] * ("d" in case.homes)
    engine.close()
    assert memory.pinned == 0


@pytest.mark.parametrize("case", ENGINES[4:], ids=lambda case: case.name)
def test_pinned_memory_changes_no_loss(case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    losses = []
    for on_gpu in (False, True):
        if on_gpu:
            pretend_gpu(monkeypatch)
        engine = make_engine(case, Ranks(0, 1, CPU), tmp_path)
        losses.append(train(engine, case, 3))
        engine.close()
    assert losses[0] == losses[1]


def test_on_a_cpu_nothing_is_pinned_and_tokens_are_not_copied(tmp_path: Path) -> None:
    case = Case(homes="hd", stash=True)
    engine = make_engine(case, Ranks(0, 1, CPU), tmp_path)
    save_while_it_trains(engine, case)
    assert engine.state.memory_report().pinned == 0
    assert engine._executor._tokens._block.size == 0
    tokens = torch.ones(1, 7, dtype=torch.int64)
    assert engine._executor._tokens.to_device(tokens) is tokens
    engine.close()


def test_token_buffer_is_reused_after_the_copies_of_the_previous_run() -> None:
    streams, memory = RecordedStreams(real=True), FakeMemory(PlainMemory())
    room = TokenBuffer(streams, CPU, memory)
    for number in range(3):
        room.prepare([(2, 4), (1, 4)])
        copies = [event for what, event in streams.log if what == "record_event"]
        assert [who for what, who in streams.log if what == "synchronize"] == copies[1::2], "the last copy of each run"
        brought = [room.to_device(torch.full((b, 5), 10 * number + b)) for b in (2, 1)]
        assert [found.unique().tolist() for found in brought] == [[10 * number + 2], [10 * number + 1]]
    room.prepare([(1, 4)])
    assert memory.asked == [8 * 15], "made once"
    room.prepare([(2, 4), (2, 4)])
    assert memory.asked == [8 * 15, 8 * 20]
    assert memory.pinned == 8 * 20
    room.close()
    assert memory.pinned == 0


def test_pinned_arena_holds_compute_weights_and_gradients_but_no_masters_or_moments(tmp_path: Path) -> None:
    case = Case(precision="bfloat16", homes="h", clipping="Global")
    engine = make_engine(case, Ranks(0, 1, CPU), tmp_path)
    memory = engine.state._store.arena.memory
    region = range(memory.data_ptr(), memory.data_ptr() + len(memory))
    for state in engine.state._store.states.values():
        assert isinstance(state, MemoryState)
        assert state.compute_weights().data_ptr() in region
        assert state.gradient().data_ptr() in region
        assert not any(vector.data_ptr() in region for vector in state._kinds.values())
    engine.close()


@pytest.mark.parametrize("clipping", ["PerUnit", "None"])
def test_gradients_pass_through_the_planned_bounce_buffers(clipping: str, tmp_path: Path) -> None:
    case = Case(precision="bfloat16", homes="hD", clipping=clipping)
    engine = make_engine(case, Ranks(0, 1, CPU), tmp_path)
    count = len(engine.state._store.arena.all_of("bounce"))
    assert count == 2
    train(engine, case)
    buffers = {id(state._buffers) for state in engine.state._store.states.values() if isinstance(state, MemoryState)}
    assert len(buffers) == 1
    (state, *_) = (state for state in engine.state._store.states.values() if isinstance(state, MemoryState))
    assert len(state._buffers._free) == count, "all of them are given back"
    assert engine.state.memory_report().state["gradients"] == 0
    engine.close()


@pytest.mark.parametrize("homes", ["h", "D"])
def test_a_dropped_gradient_gives_its_bounce_buffer_back(homes: str, tmp_path: Path) -> None:
    case = Case(precision="bfloat16", homes=homes, clipping="None")
    engine = make_engine(case, Ranks(0, 1, CPU), tmp_path)
    state: Any = engine.state._store.states[1]
    buffers: BounceBuffers = state._buffers if homes == "h" else state._disk.passing
    gradient = torch.ones(state.shard.length)
    for _ in range(3):
        state.keep_gradient(gradient)
        assert len(buffers._free) == 1
        state.drop_gradient()
        assert len(buffers._free) == 2
    state.keep_gradient(gradient)
    with pytest.raises(TypeError):
        state.update(case.optimizer, "not a rate", 1.0)
    assert len(buffers._free) == 2, "after a failure, too"
    engine.close()


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Recorded calls of a missing GPU. The first element of the list is the result of each call."""
    calls: list[Any] = [0]

    def record(name: str) -> Any:
        def recorded(*arguments: Any) -> Any:
            calls.append((name, *arguments))
            return calls[0]

        return recorded

    def record_context(name: str) -> Any:
        @contextmanager
        def recorded(index: int) -> Iterator[None]:
            calls.append((name, index))
            yield

        return recorded

    fake = SimpleNamespace(cudaHostRegister=record("register"), cudaHostUnregister=record("unregister"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.accelerator, "device_index", record_context("current device"))
    monkeypatch.setattr(torch.accelerator, "synchronize", record("wait for"))
    return calls


def test_pinned_memory_is_registered_once_and_freed_after_pending_copies(cudart: list[Any]) -> None:
    gpu, size = torch.device("cuda", 1), 3 * 4096 + 5
    memory = PinnedMemory(gpu)
    taken = memory.allocate(size)
    assert len(taken) == size
    assert taken.data_ptr() % 4096 == 0
    assert not taken.any()
    assert memory.pinned == size
    memory.free(taken)
    assert memory.pinned == 0
    begin = taken.data_ptr()
    assert cudart[1:] == [
        ("current device", 1),
        ("register", begin, size, 0),
        ("wait for", gpu),
        ("unregister", begin),
    ]


def test_other_vendors_memory_is_pinned_by_torch_and_starts_at_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    xpu, size, zeros = torch.device("xpu", 1), 3 * 4096 + 5, torch.zeros
    waits, asked = list[torch.device](), list[bool]()

    def unpinned(length: int, *, pin_memory: bool, dtype: torch.dtype) -> torch.Tensor:
        """Return memory that does not start at a page."""
        asked.append(pin_memory)
        return zeros(length + 8, dtype=dtype)[8 - zeros(0).data_ptr() % 8 :][:length]

    monkeypatch.setattr(torch, "zeros", unpinned)
    monkeypatch.setattr(torch.accelerator, "synchronize", waits.append)
    memory = allocator_for(xpu)
    taken = memory.allocate(size)
    assert asked == [True]
    assert (len(taken), taken.data_ptr() % 4096, memory.pinned) == (size, 0, size)
    assert not taken.any()
    memory.free(taken)
    assert (waits, memory.pinned) == ([xpu], 0)


def test_failure_to_pin_memory_names_its_size(cudart: list[Any]) -> None:
    cudart[0] = 2
    with pytest.raises(TrainingError, match=r"8,192 bytes of host memory cannot be pinned .* \(CUDA error 2\)"):
        PinnedMemory(torch.device("cuda", 0)).allocate(8192)


def test_a_block_is_freed_once() -> None:
    memory = FakeMemory()
    block = Block(10, memory)
    for _ in range(2):
        block.close()
    assert memory.pinned == block.size == 0
    Block(0, memory).close()
    assert memory.asked == [10], "nothing is asked for nothing"
