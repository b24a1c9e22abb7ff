"""The update of one matrix by Muon: against torch.optim.Muon, in parts, in memory and on disk."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from pseudoreal_api.spec.optimizer import Optimizer
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.state import disk as disk_state
from pseudoreal_trainer.engine.state.direct_file import aligned_buffer
from pseudoreal_trainer.engine.state.disk import Staging, open_disk_states
from pseudoreal_trainer.engine.state.memory import AdamW, MemoryState, Shard, State, Vectors
from pseudoreal_trainer.engine.state.muon import Muon
from pseudoreal_trainer.engine.state.pinned import BounceBuffers
from pseudoreal_trainer.plan.newton_schulz import flops, scratch_bytes
from pseudoreal_trainer.plan.units import KINDS, Kind, Matrix
from pseudoreal_trainer.plan.update_ranges import UpdateRange
from torch import Tensor

from tests.support.muon import orthogonalized

pytestmark = pytest.mark.processor

RATE, SCALE, DECAY = 1e-2, 0.25, 0.1
CPU = torch.device("cpu")
SHAPES = [(48, 48), (24, 80), (80, 24), (1, 7), (7, 1)]


def _drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _state(weights: Tensor, ranges: tuple[UpdateRange, ...], compute: torch.dtype) -> MemoryState:
    shard = Shard(0, len(weights), ranges, weights.dtype, compute, weights.dtype)
    masters = weights.clone()
    copy = masters if compute == weights.dtype else weights.to(compute)
    vectors = Vectors(masters, copy, torch.zeros_like(weights), keeps_previous=True)
    return MemoryState(shard, vectors, AdamW(), BounceBuffers([]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_update_of_a_matrix_is_torch_muon(shape: tuple[int, int]) -> None:
    """torch's Muon iterates in bfloat16, so with 8 significant bits; all else agrees exactly."""
    given = _drawn(1, *shape, dtype=torch.float32)
    parameter = torch.nn.Parameter(given.clone())
    theirs = torch.optim.Muon([parameter], lr=RATE, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    state = _state(given.flatten(), (UpdateRange(0, given.numel(), decay=DECAY, columns=shape[1]),), torch.float32)
    for step in range(3):
        gradient = _drawn(10 + step, *shape, dtype=torch.float32)
        parameter.grad = gradient * SCALE
        theirs.step()
        state.keep_gradient(gradient.flatten())
        state.update(Optimizer(), RATE, SCALE)
    changed = (parameter.detach() - given).norm()
    assert (state.part("weights", 0, given.numel()).view(shape) - parameter.detach()).norm() < 0.02 * changed
    (momentum,) = (theirs.state[parameter][name] for name in ("momentum_buffer",))
    torch.testing.assert_close(state.part("first_moment", 0, given.numel()).view(shape), momentum)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_orthogonalized_matrix_agrees_with_the_singular_value_decomposition(shape: tuple[int, int]) -> None:
    matrix, muon = UpdateRange(0, shape[0] * shape[1], rate=2.0, columns=shape[1]), Muon()
    direction = muon.direction(matrix, torch.float64, CPU)
    direction.copy_((given := _drawn(2, *shape)).flatten())
    muon.orthogonalize(matrix, direction, RATE)
    expected = orthogonalized(given) * (-2 * RATE * 0.2 * max(shape) ** 0.5)
    torch.testing.assert_close(direction.view(shape), expected, rtol=0, atol=1e-13)


def test_a_matrix_without_gradient_only_decays() -> None:
    given = _drawn(3, 6 * 4)
    state = _state(given, (UpdateRange(0, 24, decay=DECAY, columns=4),), torch.float64)
    state.keep_gradient(torch.zeros(24, dtype=torch.float64))
    state.update(Optimizer(), RATE, 1.0)
    assert state.part("weights", 0, 24).equal(given * (1 - RATE * DECAY))


def test_momentum_in_parts_has_the_bits_of_the_whole() -> None:
    """A disk cuts at multiples of a page, wherever a matrix starts: parts have any length."""
    muon, gradient = Muon(), _drawn(5, 1001, dtype=torch.float32)
    momentum, of_parts = (_drawn(4, 1001, dtype=torch.float32) for _ in range(2))
    direction, from_parts = (torch.empty(1001) for _ in range(2))
    muon.accumulate(direction, momentum, gradient, 0.3)
    for part in (slice(0, 5), slice(5, 640), slice(640, 1001)):
        muon.accumulate(from_parts[part], of_parts[part], gradient[part], 0.3)
    assert of_parts.equal(momentum)
    assert from_parts.equal(direction)


def test_scratch_memory_is_as_planned_and_kept() -> None:
    muon = Muon(torch.bfloat16)
    matrices = [UpdateRange(0, rows * columns, columns=columns) for rows, columns in SHAPES]
    muon.reserve(matrices, torch.float32, CPU)
    expected = max(scratch_bytes(*shape, 4, 4) for shape in SHAPES)
    before = muon._scratch[CPU]
    for matrix in matrices:
        muon.orthogonalize(matrix, muon.direction(matrix, torch.float32, CPU), RATE)
    assert muon._scratch[CPU] is before
    assert before.nbytes == expected


def test_operations_are_three_products_in_each_of_five_iterations() -> None:
    assert flops(24, 80) == flops(80, 24) == 5 * (2 * 24 * 24 * 80 + 2 * 24**3 + 2 * 24 * 24 * 80)


ROWS, COLUMNS = 37, 59
MATRICES = tuple(Matrix(begin, ROWS, COLUMNS) for begin in range(0, 3 * ROWS * COLUMNS, ROWS * COLUMNS))
"""None starts at a page but the first, and each has pages of its own."""
HIDDEN, LENGTH = MATRICES[-1].end, MATRICES[-1].end + 500
RANGES = (
    *(UpdateRange(one.begin, one.end, decay=DECAY, columns=one.columns) for one in MATRICES),
    UpdateRange(HIDDEN, LENGTH - 30, rate=3.0),
    UpdateRange(LENGTH - 30, LENGTH, is_balancing=True),
)
Pair = tuple[State, MemoryState]


@pytest.fixture(params=["float64", "float32", "bfloat16"])
def compute(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = getattr(torch, request.param)
    return found


@pytest.fixture(params=[True, False], ids=["gradients on disk", "gradients in memory"])
def pair(
    request: pytest.FixtureRequest, compute: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    """The same unit on a disk and in memory. A chunk is a page, so a matrix spans two or three."""
    monkeypatch.setattr(disk_state, "CHUNK", 2048)
    master = compute if compute == torch.float64 else torch.float32
    weights = _drawn(6, LENGTH, dtype=master)
    memory = _state(weights, RANGES, compute)
    staging = {0: Staging([aligned_buffer(LENGTH * compute.itemsize)])}
    passing = BounceBuffers([aligned_buffer(LENGTH * master.itemsize)])
    disk = open_disk_states(
        tmp_path, {0: memory.shard}, staging, passing, AdamW(), Trace(0), keeps_gradients=request.param
    )[0]
    for kind in KINDS:
        disk.put(kind, weights if kind == "weights" else torch.zeros(LENGTH, dtype=master))
    yield disk, memory
    disk.close()


def _assert_alike(pair: Pair) -> None:
    disk, memory = pair
    for kind in KINDS:
        first = memory.shard.first_of(kind)
        assert disk.part(kind, first, LENGTH).equal(memory.part(kind, first, LENGTH)), kind
    done: Future[None] = Future()
    done.set_result(None)
    disk.read_ahead(done)
    assert disk.compute_weights().equal(memory.compute_weights())
    assert memory.compute_weights().equal(memory.part("weights", 0, LENGTH).to(memory.shard.compute))
    disk.release_weights(None)


@pytest.mark.parametrize("idle", [(), (range(MATRICES[1].begin, MATRICES[1].end),)], ids=["all", "one expert idle"])
def test_disk_state_updates_matrices_like_memory_state(pair: Pair, idle: tuple[range, ...]) -> None:
    before = pair[1].part("weights", 0, LENGTH).clone()
    for step in range(3):
        gradient = _drawn(20 + step, LENGTH, dtype=before.dtype)
        for state in pair:
            state.keep_gradient(gradient)
            state.update(Optimizer(), RATE, SCALE, idle)
    _assert_alike(pair)
    changed = pair[1].part("weights", 0, LENGTH) != before
    expected = torch.ones(LENGTH, dtype=torch.bool)
    for gap in idle:
        expected[gap.start : gap.stop] = False
    assert changed.equal(expected)


def test_second_moments_of_matrices_take_no_memory(pair: Pair, compute: torch.dtype) -> None:
    master = 8 if compute == torch.float64 else 4
    for state in pair:
        assert state.kept_bytes()["moments"] == master * (LENGTH + LENGTH - HIDDEN // 2048 * 2048)


@pytest.mark.parametrize("factor", [1.0, SCALE], ids=["not clipped", "clipped"])
def test_speculative_update_of_matrices_ends_with_the_same_bits(compute: torch.dtype, factor: float) -> None:
    master = compute if compute == torch.float64 else torch.float32
    weights = _drawn(6, LENGTH, dtype=master)
    waiting, speculative = (_state(weights.clone(), RANGES, compute) for _ in range(2))
    for step in range(3):
        gradient = _drawn(20 + step, LENGTH, dtype=master)
        # An idle expert has a matrix and, behind all matrices, biases.
        idle = (range(MATRICES[1].begin, MATRICES[1].end), range(HIDDEN, HIDDEN + 96)) if step == 1 else ()
        for state in (waiting, speculative):
            state.keep_gradient(gradient)
        speculative.speculate(Optimizer(), RATE)
        for state in (waiting, speculative):
            state.update(Optimizer(), RATE, factor, idle)
    kinds: tuple[Kind, ...] = KINDS
    for kind in kinds:
        first = waiting.shard.first_of(kind)
        assert speculative.part(kind, first, LENGTH).equal(waiting.part(kind, first, LENGTH)), kind
    assert speculative.compute_weights().equal(waiting.compute_weights())
