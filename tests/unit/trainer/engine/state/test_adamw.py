"""AdamW in one pass over memory: the same bits as three passes, and the bytes of memory that it touches."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from pseudoreal_api.spec.optimizer import Optimizer
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.engine.state import memory, store
from pseudoreal_trainer.engine.state.memory import AdamW, Slices
from pseudoreal_trainer.engine.state.muon import Muon
from pseudoreal_trainer.plan.memory.tiers import threads_of_updates
from pseudoreal_trainer.plan.update_ranges import UpdateRange
from torch import Tensor
from torch.optim.adamw import adamw as torchs_adamw

from tests.unit.trainer.engine.state.support.pieces import PIECE
from tests.unit.trainer.engine.support.cases import Case
from tests.unit.trainer.engine.support.running import make_engine

pytestmark = pytest.mark.processor

SPEC, RATE, SCALE = Optimizer(epsilon="1e-4"), 1e-2, 0.3


def ranges_of(length: int, decayed: int) -> tuple[UpdateRange, ...]:
    """Return a range with weight decay, then a range without decay and with its own learning rate."""
    both = (UpdateRange(0, decayed, decay=float(SPEC.weight_decay)), UpdateRange(decayed, length, rate=0.5))
    return tuple(one for one in both if one.begin < one.end)


def make(length: int, master: torch.dtype, compute: torch.dtype, decayed: int) -> Slices:
    random = torch.Generator().manual_seed(length)
    weights, first, second, gradient = (torch.randn(length, dtype=master, generator=random) for _ in range(4))
    copy = None if compute == master else torch.empty(length, dtype=compute)
    return Slices(weights, first, second.square_(), gradient, copy, ranges_of(length, decayed))


def update_in_three_passes(slices: Slices, steps: int, scale: float) -> None:
    """Clip, update and cast, each over the whole vector, with torch's public update."""
    gradient = slices.gradient * scale
    for one in slices.ranges:
        part = slice(one.begin, one.end)
        torchs_adamw(
            [slices.weights[part]],
            [gradient[part]],
            [slices.first_moment[part]],
            [slices.second_moment[part]],
            [],
            [torch.tensor(float(steps))],
            fused=True,
            amsgrad=False,
            beta1=float(SPEC.beta1),
            beta2=float(SPEC.beta2),
            lr=RATE if one.decay else RATE / 2,
            weight_decay=one.decay,
            eps=1e-4,
            maximize=False,
        )
    if slices.compute is not None:
        slices.compute.copy_(slices.weights)


@pytest.mark.parametrize("scale", [1.0, SCALE])
@pytest.mark.parametrize(
    ("length", "decayed"),
    [(7 * PIECE + 5, 3 * PIECE + 21), (PIECE, PIECE), (PIECE, 0), (100, 33), (3, 3)],
)
@pytest.mark.parametrize("types", [("float32", "bfloat16"), ("float32", "float32"), ("float64", "float64")])
def test_adamw_in_one_pass_equals_three_kernels_to_the_bit(
    types: tuple[str, str], length: int, decayed: int, scale: float, optimizer: AdamW
) -> None:
    master, compute = (getattr(torch, name) for name in types)
    one, three = (make(length, master, compute, decayed) for _ in range(2))
    before = one.gradient.clone()
    for step in range(3):
        optimizer.update(SPEC, one, step, RATE, scale)
        update_in_three_passes(three, step, scale)
    assert torch.equal(one.gradient, before), "only read"
    for name in ("weights", "first_moment", "second_moment", "compute"):
        mine, theirs = getattr(one, name), getattr(three, name)
        assert mine is theirs is None or torch.equal(mine, theirs), name


def test_adamw_raises_a_workers_failure_after_all_workers_have_ended(
    optimizer: AdamW, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    def fail(weights: Tensor, gradient: Tensor, moments: Any, piece: UpdateRange) -> None:  # noqa: ARG001
        ended.append(piece.begin)
        raise MemoryError(f"piece {piece.begin}")

    monkeypatch.setattr(memory._Kernel, "__call__", lambda _, *arguments: fail(*arguments))
    with pytest.raises(MemoryError, match="piece"):
        optimizer.update(SPEC, make(4 * PIECE, torch.float32, torch.bfloat16, 0), 0, RATE, SCALE)
    assert len(ended) == min(2, torch.get_num_threads())


@pytest.mark.parametrize(("threads", "of_workers"), [(1, [1]), (2, [1, 1]), (3, [2, 1]), (14, [7, 7])])
def test_two_workers_share_the_threads_of_torch(
    threads: int, of_workers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two kernels a thread needs Python's lock. If Python had a thread for each core, the thread that launches
    passes would wait for all of them."""
    monkeypatch.setattr(memory, "PIECE", PIECE)
    launched, adamw, both = dict[int, int](), torch._fused_adamw_, Barrier(len(of_workers), timeout=20)

    def count(weights: list[Tensor], *arguments: Any, **options: Any) -> None:
        if threading.get_ident() not in launched:
            launched[threading.get_ident()] = torch.get_num_threads()
            both.wait()
        adamw(weights, *arguments, **options)

    monkeypatch.setattr(torch, "_fused_adamw_", count)
    before, length = torch.get_num_threads(), 8 * threads * PIECE
    torch.set_num_threads(threads)
    try:
        optimizer = AdamW()
        optimizer.update(SPEC, make(length, torch.float32, torch.bfloat16, length), 0, RATE, SCALE)
        assert sorted(launched.values(), reverse=True) == of_workers
        assert torch.get_num_threads() == threads, "other threads keep their number"
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("cores", "beside_a_gpu"), [(1, 1), (2, 2), (4, 3), (8, 6), (16, 14)])
def test_beside_a_gpu_updates_leave_cores_to_the_threads_that_launch(cores: int, beside_a_gpu: int) -> None:
    assert threads_of_updates(cores, "accelerator") == beside_a_gpu
    assert threads_of_updates(cores, "cpu") == cores


def test_the_updates_of_an_engine_beside_an_accelerator_have_these_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "kind_of", lambda _: "accelerator")
    made: list[int | None] = []

    def adamw(muon: Muon, threads: int | None = None) -> AdamW:
        made.append(threads)
        return AdamW(muon, threads)

    monkeypatch.setattr(store, "AdamW", adamw)
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        make_engine(Case(homes="h"), Ranks(0, 1, torch.device("cpu")), tmp_path).close()
    finally:
        torch.set_num_threads(before)
    assert made == [6]


def test_adamw_scratch_memory_has_the_planned_size(optimizer: AdamW) -> None:
    def scratch() -> int:
        return sum(room.nbytes for room in optimizer._scratch.values())

    threads = torch.get_num_threads()
    slices, planned = make(7 * threads * PIECE, torch.float32, torch.bfloat16, 0), threads * 4 * PIECE
    optimizer.update(SPEC, slices, 0, RATE, 1.0)
    assert scratch() == 0
    optimizer.update(SPEC, slices, 0, RATE, SCALE)
    assert 0 < scratch() <= planned, "a worker that found no piece left has none"
    for worker in range(min(2, threads)):
        optimizer._scaled(slices.gradient[:100], SCALE, torch.float32, worker)
    assert scratch() == planned


BLOCK = 4096


class _Memory:
    """Counts the bytes between memory and a cache that keeps the most recently used blocks. Each operation goes over
    its operands once, from start to end."""

    def __init__(self, cache: int) -> None:
        self._blocks: OrderedDict[int, bool] = OrderedDict()
        """Address -> whether the block was changed in the cache."""
        self._capacity = cache // BLOCK
        self._bytes = 0

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Patch all operations of an update."""
        mul, mul_, copy_, adamw_ = torch.mul, Tensor.mul_, Tensor.copy_, torch._fused_adamw_

        def update(weights: Any, gradients: Any, first: Any, second: Any, *rest: Any, **options: Any) -> None:
            self._run(reads=[*weights, *gradients, *first, *second], writes=[*weights, *first, *second])
            adamw_(weights, gradients, first, second, *rest, **options)

        def copy(target: Tensor, source: Tensor) -> Tensor:
            self._run(reads=[source], writes=[target])
            return copy_(target, source)

        def scale(source: Tensor, factor: float) -> Tensor:
            self._run(reads=[source], writes=[source])
            return mul_(source, factor)

        def scaled(source: Tensor, factor: float, out: Tensor) -> Tensor:
            self._run(reads=[source], writes=[out])
            return mul(source, factor, out=out)

        patch.setattr(torch, "_fused_adamw_", update)
        patch.setattr(torch, "mul", scaled)
        patch.setattr(Tensor, "mul_", scale)
        patch.setattr(Tensor, "copy_", copy)

    def _run(self, reads: list[Tensor], writes: list[Tensor]) -> None:
        for place in range(0, max(tensor.nbytes for tensor in reads), BLOCK):
            for tensor in reads:
                self._touch(tensor, place, reads=True)
            for tensor in writes:
                self._touch(tensor, place, writes=True)

    def _touch(self, tensor: Tensor, place: int, *, reads: bool = False, writes: bool = False) -> None:
        if place >= tensor.nbytes:
            return
        block = (tensor.data_ptr() + place) // BLOCK
        if reads and block not in self._blocks:
            self._bytes += BLOCK
        self._blocks[block] = self._blocks.get(block, False) or writes
        self._blocks.move_to_end(block)
        if len(self._blocks) > self._capacity:
            self._bytes += BLOCK if self._blocks.popitem(last=False)[1] else 0

    @property
    def bytes(self) -> int:
        """Bytes so far, including blocks that are still to be written back."""
        return self._bytes + BLOCK * sum(self._blocks.values())


def count_touched_bytes_per_element(act: Callable[[], object], length: int) -> float:
    """Return the bytes of memory per element, with a cache for eight pieces of a vector."""
    memory = _Memory(8 * 4 * PIECE)
    with pytest.MonkeyPatch.context() as patch:
        memory.watch(patch)
        act()
    return memory.bytes / length


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[AdamW]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(memory, "PIECE", PIECE)
    yield AdamW()
    torch.set_num_threads(before)


@pytest.mark.parametrize(("compute", "most"), [("bfloat16", 30), ("float32", 28)])
def test_adamw_in_one_pass_touches_the_fewest_bytes_per_element(compute: str, most: int, one_thread: AdamW) -> None:
    """The numbers are for an update that clips. The ends of a piece lie in blocks that two pieces share, so the count
    is slightly higher."""
    length = 24 * PIECE
    slices = make(length, torch.float32, getattr(torch, compute), length)
    counted = count_touched_bytes_per_element(lambda: one_thread.update(SPEC, slices, 0, RATE, SCALE), length)
    assert most <= counted < 1.02 * most


def test_three_kernels_touch_42_bytes_per_element() -> None:
    """Checks the counter against the known bytes of three passes."""
    length = 24 * PIECE
    slices = make(length, torch.float32, torch.bfloat16, length)
    counted = count_touched_bytes_per_element(
        lambda: memory._whole(memory._kernel(SPEC, 1, RATE, SCALE, slices.weights.device), slices), length
    )
    assert 42 <= counted < 1.02 * 42


def test_a_balancing_bias_accumulates_changes_below_bfloat16_resolution() -> None:
    """The bias adds up in float32; the copy for the choice of experts is rounded. From 0.25 on, bfloat16 has steps of
    0.002, twice the rate."""
    steps, rate = 100, 0.001
    weights, compute = torch.full((1,), 0.3), torch.full((1,), 0.3, dtype=torch.bfloat16)
    zeros, change = torch.zeros(1), torch.full((1,), rate)
    ranges = (UpdateRange(0, 1, is_balancing=True),)
    for _ in range(steps):
        AdamW().update(SPEC, Slices(weights, zeros, zeros, change, compute, ranges), 0, RATE, 1.0)
    assert weights.item() == pytest.approx(0.3 + steps * rate, rel=1e-5)
    assert compute.item() == pytest.approx(weights.item(), rel=2**-8)
