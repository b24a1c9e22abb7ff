"""`pseudoreal measure-hardware` at small scale: it runs, and known times yield the expected profile."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pseudoreal_trainer.engine.state.memory import AdamW, Slices
from pseudoreal_trainer.estimate.time.hardware import Precision, pass_speed, read_profile
from pseudoreal_trainer.measure import machine, passes, transfers
from pseudoreal_trainer.measure.passes import Cell, measure_cell, most_on_cpu, rows, scratch_share
from pseudoreal_trainer.measure.timing import line_through, seconds_of
from pseudoreal_trainer.plan.memory.autograd_memory import AutogradMemory

from tests.support.processes import Forked, preload, succeed
from tests.unit.trainer.estimate.time.support.profiles import profile

preload("tests.support.warm")

CPU = torch.device("cpu")


def test_latency_and_speed_from_two_points() -> None:
    line = line_through((100, 3.0), (1100, 5.0))
    assert line.bytes_per_second == pytest.approx(500)
    assert line.latency_seconds == pytest.approx(2.8)
    assert line.seconds(2100) == pytest.approx(7.0)


def test_noise_gives_no_negative_latency_or_speed() -> None:
    line = line_through((100, 3.0), (1100, 2.0))
    assert line.latency_seconds >= 0
    assert line.bytes_per_second > 0


def test_seconds_of_measures_a_known_duration() -> None:
    assert 0.02 <= seconds_of(lambda: time.sleep(0.02), CPU) < 2


def test_speeds_are_the_operations_of_a_pass_over_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward takes one second, forward and backward together four, the head two."""
    seconds = iter((1.0, 4.0, 2.0))
    monkeypatch.setattr(passes, "seconds_of", lambda *_: next(seconds))
    speed = measure_cell(Cell("float32", hidden=64, tokens=256), CPU)
    tokens, width, ffn, sequence = 256, 64, 256, 128
    # Four square matrices and two MLP matrices; attention's two products, with half of the tokens each.
    forward = 2 * tokens * (4 * width**2 + 2 * width * ffn) + 2 * (2 * tokens * width * sequence // 2)
    assert speed.block_forward_flops_per_second == forward
    assert speed.block_backward_flops_per_second == pytest.approx(2 * forward / 3)
    assert speed.head_flops_per_second == 3 * (2 * tokens * width * 256) / 2


def test_the_scratch_share_is_the_peak_beyond_the_plan() -> None:
    def act() -> torch.Tensor:
        torch.empty(3000, dtype=torch.uint8)
        return torch.empty(1000, dtype=torch.uint8)

    assert most_on_cpu(act) == 3000
    assert scratch_share(act, CPU, 2000) == 0.5
    assert scratch_share(act, CPU, 4000) == 0.0, "a plan above the measured bytes gives no share"


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_bytes_of_a_pass_that_was_not_measured_are_within_a_tenth(compute: Precision) -> None:
    """Scratch bytes interpolated from larger and smaller passes on this processor are compared with a measurement."""
    measured = [measure_cell(Cell(compute, hidden, tokens), CPU) for hidden in (64, 128) for tokens in (64, 256)]
    speeds = profile().speeds[0].model_copy(update={"passes": measured})
    cell = Cell(compute, hidden=96, tokens=128)
    share = pass_speed(speeds, compute, cell.hidden, cell.tokens).scratch_share
    planned = AutogradMemory(cell.sizes, cell.tokens).block_backward
    actual = (1 + measure_cell(cell, CPU).scratch_share) * planned
    assert (1 + share) * planned == pytest.approx(actual, rel=0.1)


def test_long_rows_end_where_more_tokens_would_take_too_long() -> None:
    cell = Cell("float32", hidden=64, tokens=64)
    fast = measure_cell(cell, CPU)
    assert not passes.is_slow(cell, fast.model_copy(update={"block_forward_flops_per_second": 1e15}))
    assert passes.is_slow(cell, fast.model_copy(update={"block_forward_flops_per_second": 1.0}))


@pytest.mark.parametrize(("device", "vocabulary", "width"), [(torch.device("cuda", 0), 32768, 128), (CPU, 256, 32)])
def test_cells_have_vocabularies_and_heads_as_in_models_trained_on_the_device(
    device: torch.device, vocabulary: int, width: int
) -> None:
    models = [cell.sizes.model for row in rows(device) for cell in row]
    assert {(model.vocabulary_size, model.head_size) for model in models} == {(vocabulary, width)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_rank_writes_the_speeds(ranks: int, tmp_path: Path) -> None:
    succeed(Forked(_measure_little, rank, ranks, tmp_path) for rank in range(ranks))
    file = tmp_path / "profile.yaml"
    speeds = (tmp_path / f"speeds-{ranks}.json").read_text()
    file.write_text(f"version: 1\nname: this machine\noverlaps: false\nspeeds: [{speeds}]\n")
    (found,) = read_profile(file).speeds
    assert found.ranks == ranks
    assert [row.hidden for row in found.passes] == [64]
    assert [group.ranks for group in found.collectives] == ([] if ranks == 1 else [2])
    assert (found.agree_seconds > 0) == (ranks > 1)


def _measure_little(rank: int, world: int, folder: Path) -> None:
    from pseudoreal_trainer.measure import machine as module
    from pseudoreal_trainer.measure import transfers

    transfers.MOST_BYTES = transfers.DISK_BYTES = 2**22
    setattr(module, "rows", lambda _: [[Cell("float32", hidden=64, tokens=64)]])  # noqa: B010
    module.measure_as_rank(rank, world, "cpu", folder, lambda _: None)


def test_vectors_are_beyond_caches_and_leave_memory_free() -> None:
    most = transfers.vector_bytes(CPU, ranks=1, vectors=2)
    assert 2**26 <= most <= transfers.MOST_BYTES == 2**31
    assert transfers.vector_bytes(CPU, ranks=2**20, vectors=2) < most
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 4 * transfers.vector_bytes(CPU, ranks=1, vectors=4) < total / 4


def test_an_update_is_measured_with_clipping_and_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's updates include clipping and the cast to the compute dtype."""
    monkeypatch.setattr(transfers, "MOST_BYTES", 2**20)
    seen: list[tuple[Slices, float]] = []
    update = AdamW.update

    def record(self: AdamW, spec: Any, slices: Slices, steps: Any, rate: float, scale: float) -> None:
        seen.append((slices, scale))
        update(self, spec, slices, steps, rate, scale)

    monkeypatch.setattr(AdamW, "update", record)
    assert 0 < transfers.update_seconds_per_element(CPU, 1) < 1e-3
    slices, scale = seen[0]
    assert scale < 1
    assert slices.compute is not None
    assert slices.compute.dtype == torch.bfloat16
    assert len(slices.weights) == 2**18


def test_the_device_is_chosen_before_anything_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []

    def measured(*_: Any) -> Any:
        calls.append("measured")
        return profile().speeds[0]

    monkeypatch.setattr(torch.accelerator, "set_device_index", calls.append)
    monkeypatch.setattr(machine, "_speeds", measured)
    threads = torch.get_num_threads()
    machine.measure_as_rank(0, 1, "cuda", tmp_path, lambda _: None)
    torch.set_num_threads(threads)
    assert calls == [torch.device("cuda", 0), "measured"]


@pytest.mark.parametrize("gpus", [0, 2])
def test_the_device_bytes_of_a_profile_exclude_the_reserve(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = torch.device("cuda") if gpus else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: kind)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (0, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(machine, "_measure_with", lambda ranks, *_: profile(ranks=ranks).speeds[0])
    found = machine.measure_machine(lambda _: None)
    assert found.device_bytes == (78 * 2**30 if gpus else None)
    assert found.overlaps == (gpus > 0)
    assert found.name == "a GPU" or not gpus


def test_passes_of_a_gpu_have_the_attention_of_its_models() -> None:
    for row in passes.rows(torch.device("cuda")):
        model = row[-1].sizes.model
        assert (model.sequence_length, model.hidden_size // model.attention.heads) == (2048, 128)
