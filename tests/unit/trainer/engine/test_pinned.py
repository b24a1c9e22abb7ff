"""One region of host memory for what crosses the bus, without a GPU: its size, what lies in it, and its end."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pseudoreal_trainer.engine import build, pinned
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.pinned import Allocator, PinnedMemory, PlainMemory, Region, Slots
from pseudoreal_trainer.engine.ranks import Ranks
from pseudoreal_trainer.engine.runner import Training
from pseudoreal_trainer.engine.state import MemoryState
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.plan.crossing import crossing
from pseudoreal_trainer.plan.memory import held
from torch import Tensor

from tests.unit.trainer.engine.cases import RATE, Case
from tests.unit.trainer.engine.ranks import CaseBatch, make_engine
from tests.unit.trainer.plan.test_against_engine import sizes_of
from tests.unit.trainer.plan.test_crossing import PARAMETERS, SIZES, layout

CPU = torch.device("cpu")


class Fake:
    """Memory without bytes, unless there is an allocator that has some."""

    def __init__(self, real: Allocator | None = None) -> None:
        self._real = real
        self.asked: list[int] = []
        self.freed = 0

    def allocate(self, size: int) -> Tensor:
        self.asked.append(size)
        return torch.empty(size, dtype=torch.uint8, device="meta") if self._real is None else self._real.allocate(size)

    def free(self, memory: Tensor) -> None:
        self.freed += len(memory)


def test_6_5_billion_parameters_ask_once_and_to_the_byte() -> None:
    planned, fake = crossing(layout("host"), SIZES, 0), Fake()
    region = Region(planned, fake)
    vectors = [region.vector("weights", unit, torch.bfloat16) for unit in range(len(SIZES.units))]
    vectors += [region.vector("gradient", unit, torch.float32) for unit in range(len(SIZES.units))]
    assert fake.asked == [held(layout("host"), SIZES, 0).pinned] == [6 * PARAMETERS]
    assert sum(vector.nbytes for vector in vectors) == fake.asked[0]
    assert [len(vector) for vector in vectors] == 2 * [unit.numel for unit in SIZES.units]


ENGINES = [
    Case(precision="bfloat16", homes="h", clipping="global"),
    Case(precision="bfloat16", homes="hDd", clipping="perUnit"),
    Case(precision="float32", homes="hD", clipping="none", window=1),
    Case(precision="float32", homes="d"),
]


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake(PlainMemory())
    monkeypatch.setattr(build, "allocator_for", lambda _: fake)
    return fake


def train(engine: Engine, case: Case, steps: int = 2) -> None:
    batch = CaseBatch(case, 0, 0, CPU)
    for step in range(steps):
        engine.train(batch, Training(100, RATE, stop=False), step + 1)
    engine.settle()


@pytest.mark.parametrize("case", ENGINES, ids=lambda case: case.name)
def test_an_engine_takes_what_the_plan_says_and_nothing_else_is_pinned(
    case: Case, allocator: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("zeros", "empty"):
        monkeypatch.setattr(torch, name, _without_pinning(getattr(torch, name)))
    engine = make_engine(case, Ranks(0, 1, CPU), tmp_path)
    train(engine, case)
    planned = crossing(case.layout, sizes_of(case), 0).size
    assert allocator.asked == ([planned] if planned else [])
    assert engine.crossing_bytes() == planned
    assert allocator.freed == 0
    engine.close()
    assert allocator.freed == planned


def _without_pinning(make: Any) -> Any:
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        assert not pin_memory, "rounds up to a power of two"
        tensor: Tensor = make(*args, **kwargs)
        return tensor

    return made


def test_copies_and_gradients_lie_in_the_region_and_masters_and_moments_do_not(tmp_path: Path) -> None:
    case = Case(precision="bfloat16", homes="h", clipping="global")
    engine = make_engine(case, Ranks(0, 1, CPU), tmp_path)
    memory = engine._parts.region._memory
    region = range(memory.data_ptr(), memory.data_ptr() + len(memory))
    for state in engine._parts.states.values():
        assert isinstance(state, MemoryState)
        assert state.compute_weights().data_ptr() in region
        assert state.gradient().data_ptr() in region
        assert not any(vector.data_ptr() in region for vector in state._kinds.values())
    engine.close()


@pytest.mark.parametrize("clipping", ["perUnit", "none"])
def test_gradients_pass_through_the_rooms_of_the_plan(clipping: str, tmp_path: Path) -> None:
    case = Case(precision="bfloat16", homes="hD", clipping=clipping)
    engine = make_engine(case, Ranks(0, 1, CPU), tmp_path)
    rooms = len(engine._parts.region.all_of("passing"))
    assert rooms == 2
    train(engine, case)
    slots = {id(state._slots) for state in engine._parts.states.values() if isinstance(state, MemoryState)}
    assert len(slots) == 1
    (state, *_) = (state for state in engine._parts.states.values() if isinstance(state, MemoryState))
    assert len(state._slots._free) == rooms, "all of them are given back"
    assert engine.state_bytes()["gradients"] == 0
    engine.close()


@pytest.mark.parametrize("homes", ["h", "D"])
def test_a_gradient_that_is_not_wanted_gives_its_room_back(homes: str, tmp_path: Path) -> None:
    case = Case(precision="bfloat16", homes=homes, clipping="none")
    engine = make_engine(case, Ranks(0, 1, CPU), tmp_path)
    state: Any = engine._parts.states[1]
    slots: Slots = state._slots if homes == "h" else state._disk.slots
    gradient = torch.ones(state.extent.length)
    for _ in range(3):
        state.keep_gradient(gradient)
        assert torch.equal(state.gradient(), gradient)
        assert len(slots._free) == 1
        state.drop_gradient()
        assert len(slots._free) == 2
    state.keep_gradient(gradient)
    with pytest.raises(TypeError):
        state.update(case.optimizer, "not a rate", 1.0)
    assert len(slots._free) == 2, "after a failure, too"
    engine.close()


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of a GPU that is not there. The first element of the list is what registering answers."""
    calls: list[Any] = [0]

    def record(name: str) -> Any:
        return lambda *arguments: calls.append((name, *arguments)) or calls[0]

    fake = SimpleNamespace(cudaHostRegister=record("register"), cudaHostUnregister=record("unregister"))
    monkeypatch.setattr(pinned.torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(pinned.torch.cuda, "device", lambda _: torch.no_grad())
    monkeypatch.setattr(pinned.torch.cuda, "synchronize", record("wait for"))
    return calls


def test_pinned_memory_is_registered_once_and_no_copy_uses_it_when_it_ends(cudart: list[Any]) -> None:
    gpu, size = torch.device("cuda", 0), 3 * 4096 + 5
    memory = PinnedMemory(gpu)
    taken = memory.allocate(size)
    assert len(taken) == size
    assert taken.data_ptr() % 4096 == 0
    assert not taken.any()
    memory.free(taken)
    begin = taken.data_ptr()
    assert cudart[1:] == [("register", begin, size, 0), ("wait for", gpu), ("unregister", begin)]


def test_memory_that_cannot_be_pinned_is_missed_with_its_size(cudart: list[Any]) -> None:
    cudart[0] = 2
    with pytest.raises(TrainingError, match=r"8,192 bytes of host memory cannot be pinned .* \(CUDA error 2\)"):
        PinnedMemory(torch.device("cuda", 0)).allocate(8192)
