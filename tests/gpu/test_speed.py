"""Seconds of a step beside torch's fully_shard, on one GPU, with and without offload; for benchmark-results/gpu.json.

Losses must agree; the ratios are reported, not judged: they are the GPU's and the link's as much as the engine's.
"""

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.distributed as dist
from pseudoreal_api.model_spec import FeedForward, Model

from tests.benchmarks.stacks import fully_shard, ours
from tests.benchmarks.work import Stack, Work, noisy_sequences

pytestmark = pytest.mark.gpu

MODEL = Model(layers=12, hidden=1024, heads=16, sequence=512, ffn=FeedForward(hidden=4096))
WARM_UP, TIMED = 3, 10
STACKS: dict[str, Stack] = {
    "host": ours.at("host"),
    "disk": ours.at("disk"),
    "device": ours.at("device"),
    "fully_shard": fully_shard.on_device,
    "fully_shard + CPUOffloadPolicy": fully_shard.offloaded,
}
RATIOS = [
    ("host", "fully_shard + CPUOffloadPolicy"),
    ("disk", "fully_shard + CPUOffloadPolicy"),
    ("host", "fully_shard"),
    ("host", "device"),
    ("device", "fully_shard"),
]


@pytest.fixture
def one_rank() -> Iterator[None]:
    """fully_shard needs a group, also of one."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_time_of_a_step(gpu: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    batches = noisy_sequences(WARM_UP + TIMED, sequences=16, length=MODEL.sequence + 1, seed=7).to(gpu)
    work = Work(MODEL, seed=7, batches=batches, micro_batches=4, recompute=True)
    seconds, losses = {}, {}
    for name, stack in STACKS.items():
        seconds[name], losses[name] = _measured(stack, work)
        with capsys.disabled():
            print(f"\n{name}: {1000 * seconds[name]:.1f} ms", end="")
    ratios = {f"{some} / {other}": seconds[some] / seconds[other] for some, other in RATIOS}
    with capsys.disabled():
        print("", *(f"{name}: {ratio:.2f}" for name, ratio in ratios.items()), sep="\n")
    _write(gpu, seconds, ratios)
    for name in STACKS:
        assert losses[name] == pytest.approx(losses["fully_shard"], rel=1e-3), name


def _measured(stack: Stack, work: Work) -> tuple[float, list[float]]:
    """Median seconds of the timed steps, and the losses of all."""
    ends, losses = [], []
    for loss in stack(work, 0, 1):
        losses.append(float(loss))
        torch.cuda.synchronize()
        ends.append(time.perf_counter())
    timed = ends[WARM_UP - 1 :]
    return median(end - begin for begin, end in pairwise(timed)), losses


def _write(gpu: torch.device, seconds: dict[str, float], ratios: dict[str, float]) -> None:
    file = Path("benchmark-results", "gpu.json")
    file.parent.mkdir(exist_ok=True)
    machine = {"gpu": torch.cuda.get_device_name(gpu), "torch": torch.__version__}
    file.write_text(json.dumps({**machine, "seconds": seconds, "ratios": ratios}, indent=1) + "\n")
