"""A unit's state on disk, in several chunks, equals the same state in memory bitwise."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pseudoreal_api.spec.optimizer import Optimizer
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.state import disk as disk_state
from pseudoreal_trainer.engine.state.blocks import BLOCKS
from pseudoreal_trainer.engine.state.direct_file import aligned_buffer
from pseudoreal_trainer.engine.state.disk import Staging, open_disk_states
from pseudoreal_trainer.engine.state.memory import AdamW, MemoryState, Shard, State, Vectors
from pseudoreal_trainer.engine.state.pinned import BounceBuffers
from pseudoreal_trainer.engine.state.rounding import RandomRange
from pseudoreal_trainer.plan.units import KINDS, Kind
from pseudoreal_trainer.plan.update_ranges import UpdateRange
from torch import Tensor

from tests.support.adamw import adamw_of_groups

pytestmark = pytest.mark.processor

CHUNK = 1 << 16
"""Number of elements of a chunk: whole pages of blocks of moments, too."""
RATE, SCALE = 1e-2, 0.25
LENGTHS = (5 * CHUNK + 3, CHUNK, 7)
DECAYED = (2 * CHUNK + 64, 0, 7)
FASTER = 3.0
"""Factor of the learning rate for elements without decay."""


@dataclass(frozen=True)
class Pair:
    disk: State
    memory: State


MASTERS = ["float64", "float32", "bfloat16"]
"""Compute dtypes, with moments in the master dtype."""


@pytest.fixture(params=[*MASTERS, "bfloat16, rounded moments", "float32, blocks", "bfloat16, blocks"])
def dtypes(request: pytest.FixtureRequest) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Dtypes of master weights, working copies and moments."""
    name, _, moments = request.param.partition(", ")
    compute = getattr(torch, name)
    master = compute if compute == torch.float64 else torch.float32
    return master, compute, {"": master, "rounded moments": torch.bfloat16, "blocks": BLOCKS}[moments]


@pytest.fixture(params=[True, False], ids=["gradients on disk", "gradients in memory"])
def pairs(
    request: pytest.FixtureRequest,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[list[Pair]]:
    """Three units in one file, with random weights and zero moments."""
    monkeypatch.setattr(disk_state, "CHUNK", CHUNK)
    extents = {
        i: Shard(0, length, _ranges(length, DECAYED[i]), *dtypes, random=(RandomRange(0, length, i, 0),))
        for i, length in enumerate(LENGTHS)
    }
    largest = max(LENGTHS)
    staging = dict.fromkeys(extents, Staging(aligned_buffer(largest * dtypes[1].itemsize) for _ in range(2)))
    # Without them on disk, gradients of all units are kept before the first is updated.
    passing = BounceBuffers(
        [aligned_buffer(largest * dtypes[0].itemsize) for _ in range(1 if request.param else len(LENGTHS))]
    )
    disks = open_disk_states(tmp_path, extents, staging, passing, AdamW(), Trace(0), keeps_gradients=request.param)
    made = [Pair(disks[i], _in_memory(shard)) for i, shard in extents.items()]
    for pair in made:
        weights = _random(pair, 1)
        for state in (pair.disk, pair.memory):
            state.put("weights", weights)
            for kind in ("first_moment", "second_moment"):
                state.put(kind, torch.zeros_like(weights))
    yield made
    for pair in made:
        pair.disk.close()


def _ranges(length: int, decayed: int) -> tuple[UpdateRange, ...]:
    decay = float(Optimizer().weight_decay)
    both = (UpdateRange(0, decayed, decay=decay), UpdateRange(decayed, length, rate=FASTER))
    return tuple(one for one in both if one.begin < one.end)


def _in_memory(shard: Shard) -> MemoryState:
    weights = torch.zeros(shard.length, dtype=shard.master)
    compute = weights if shard.compute == shard.master else torch.zeros(shard.length, dtype=shard.compute)
    return MemoryState(shard, Vectors(weights, compute, torch.zeros_like(weights)), AdamW(), BounceBuffers([]))


def _random(pair: Pair, seed: int) -> Tensor:
    shard = pair.memory.shard
    return torch.randn(shard.length, dtype=shard.master, generator=torch.Generator().manual_seed(seed))


def _whole(state: State, kind: Kind) -> Tensor:
    return state.part(kind, 0, state.shard.length)


def _compute_weights(state: State) -> Tensor:
    now: Future[None] = Future()
    now.set_result(None)
    state.read_ahead(now)
    weights = state.compute_weights().clone()
    state.release_weights(None)
    return weights


def test_disk_state_updates_like_memory_state(pairs: list[Pair]) -> None:
    for step in range(3):
        for pair in pairs:
            gradient = _random(pair, 10 + step)
            for state in (pair.disk, pair.memory):
                state.keep_gradient(gradient)
                state.update(Optimizer(), RATE, SCALE)
    for pair in pairs:
        assert pair.disk.steps == pair.memory.steps == 3
        for kind in KINDS:
            assert torch.equal(_whole(pair.disk, kind), _whole(pair.memory, kind)), kind
            assert _whole(pair.disk, kind).any()


def test_compute_weights_on_disk_follow_the_master_weights(pairs: list[Pair]) -> None:
    for pair in pairs:
        for state in (pair.disk, pair.memory):
            state.keep_gradient(_random(pair, 10))
            state.update(Optimizer(), RATE, 1.0)
        expected = _whole(pair.memory, "weights").to(pair.memory.shard.compute)
        assert torch.equal(pair.memory.compute_weights(), expected)
        assert torch.equal(_compute_weights(pair.disk), expected)
        for state in (pair.disk, pair.memory):
            state.put("weights", torch.ones_like(_random(pair, 0)))
        assert _compute_weights(pair.disk).eq(1).all()
        assert pair.memory.compute_weights().eq(1).all()


@pytest.mark.parametrize("dtypes", MASTERS, indirect=True)
def test_disk_state_updates_like_torch_adamw(pairs: list[Pair]) -> None:
    """The reference is torch.optim.AdamW, with decayed and other elements as two parameters."""
    for pair, decayed in zip(pairs, DECAYED, strict=True):
        spec = Optimizer()
        parts = [torch.nn.Parameter(part.clone()) for part in _random(pair, 1).tensor_split([decayed])]
        optimizer = adamw_of_groups(parts[:1], parts[1:], spec, RATE)
        optimizer.param_groups[1]["lr"] = RATE * FASTER
        for step in range(3):
            gradient = _random(pair, 10 + step)
            for part, of_part in zip(parts, (gradient * SCALE).tensor_split([decayed]), strict=True):
                part.grad = of_part
            optimizer.step()
            pair.disk.keep_gradient(gradient)
            pair.disk.update(spec, RATE, SCALE)
        assert torch.equal(_whole(pair.disk, "weights"), torch.cat([part.detach() for part in parts]))


def test_disk_update_leaves_idle_elements_unchanged(pairs: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    idle = (range(64, CHUNK + 128), range(3 * CHUNK, 5 * CHUNK))
    pair, read = pairs[0], list[int]()
    read_chunk = disk_state.DiskState._read_chunk

    def noted(self: disk_state.DiskState, turn: disk_state._Turn, number: int) -> Any:
        read.append(turn.elements.start)
        return read_chunk(self, turn, number)

    monkeypatch.setattr(disk_state.DiskState, "_read_chunk", noted)
    before = _whole(pair.memory, "weights").clone()
    for step in range(2):
        for state in (pair.disk, pair.memory):
            state.keep_gradient(_random(pair, 10 + step))
            state.update(Optimizer(), RATE, SCALE, idle)
    stays = torch.zeros(pair.memory.shard.length, dtype=torch.bool)
    for gap in idle:
        stays[gap.start : gap.stop] = True
    for kind in KINDS:
        assert torch.equal(_whole(pair.disk, kind), _whole(pair.memory, kind)), kind
    changed = _whole(pair.memory, "weights") != before
    assert not changed[stays].any()
    assert changed[~stays].all()
    expected = _whole(pair.memory, "weights").to(pair.memory.shard.compute)
    assert torch.equal(pair.memory.compute_weights(), expected)
    assert torch.equal(_compute_weights(pair.disk), expected)
    assert sorted(set(read)) == [0, CHUNK, 2 * CHUNK, 5 * CHUNK], "chunks that are idle as a whole are not read"


def test_a_disk_shard_of_padding_after_a_balancing_bias_stays_unchanged(tmp_path: Path) -> None:
    shard = Shard(960, 32, (), torch.float32, torch.bfloat16, torch.float32)
    passing = BounceBuffers([aligned_buffer(shard.length * 4)])
    staging = {0: Staging([aligned_buffer(shard.length * 2)])}
    state = open_disk_states(tmp_path, {0: shard}, staging, passing, AdamW(), Trace(0), keeps_gradients=False)[0]
    for kind in KINDS:
        state.put(kind, torch.zeros(shard.length))
    state.keep_gradient(torch.zeros(shard.length))
    state.update(Optimizer(), RATE, SCALE)
    assert not any(_whole(state, kind).any() for kind in KINDS)
    state.close()


def test_disk_state_reads_ahead_after_the_update(pairs: list[Pair]) -> None:
    failed: Future[None] = Future()
    failed.set_exception(OSError("the disk is gone"))
    pairs[0].disk.read_ahead(failed)
    with pytest.raises(OSError, match="the disk is gone"):
        pairs[0].disk.compute_weights()
