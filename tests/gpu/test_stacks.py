"""This engine and torch's fully_shard train the same model: equal losses from equal weights, in every home.

Times are printed but not checked, because they depend on the GPU and the link as much as on the engine. The benchmark
measures times.
"""

import time
from pathlib import Path
from statistics import median

import pytest
import torch
from pseudoreal_api.spec.model import Attention, FeedForward, Model
from pseudoreal_api.spec.phase import Home

from benchmarks.gpu.cases import MICRO_BATCHES, Case, Point, Stack
from benchmarks.gpu.stacks import trainer_of
from benchmarks.work import noisy_sequences
from tests.gpu.conftest import Figure

pytestmark = pytest.mark.gpu

STEPS, WARM_UP = 8, 3
LARGE = Model(
    layers=12, hidden_size=1024, attention=Attention(heads=16), sequence_length=512, feed_forward=FeedForward(size=4096)
)
SMALL = Model(
    layers=2, hidden_size=64, attention=Attention(heads=2), sequence_length=32, feed_forward=FeedForward(size=256)
)
TOLERANCE = 5e-3
"""Relative; bfloat16 gradients are summed in different orders."""


@pytest.mark.parametrize("home", ["Host", "Device"])
def test_losses_are_those_of_fully_shard(home: Home, device: torch.device, tmp_path: Path, figure: Figure) -> None:
    ours, seconds = _trained("pseudoreal", home, device, tmp_path)
    theirs, their_seconds = _trained("fully_shard", home, device, tmp_path)
    figure(
        f"{1000 * seconds:.1f} ms a step, fully_shard {1000 * their_seconds:.1f}; last losses {ours[-1]} {theirs[-1]}"
    )
    assert ours == pytest.approx(theirs, rel=TOLERANCE)
    assert ours[-1] < ours[0], "the loss fell"


def test_losses_from_disk_are_those_from_the_device(device: torch.device, tmp_path: Path, figure: Figure) -> None:
    on_disk, seconds = _trained("pseudoreal", "Disk", device, tmp_path)
    on_device, _ = _trained("pseudoreal", "Device", device, tmp_path)
    figure(f"{1000 * seconds:.1f} ms a step from disk")
    assert on_disk == pytest.approx(on_device, rel=TOLERANCE)


def _trained(stack: Stack, home: Home, device: torch.device, folder: Path) -> tuple[list[float], float]:
    """Return the loss of each step, and the median seconds of a step."""
    model, sequences = (LARGE, 16) if device.type == "cuda" else (SMALL, 4)
    point = Point(tokens=sequences * model.sequence_length, micro_batches=MICRO_BATCHES)
    case = Case(model="", stack=stack, home=home, clipping="Global", points=(point,))
    trainer = trainer_of(case, model, device, folder)
    losses, seconds = [], []
    for batch in noisy_sequences(STEPS, sequences, model.sequence_length + 1, seed=7).to(device):
        begin = time.perf_counter()
        losses.append(trainer.train(batch, MICRO_BATCHES))
        seconds.append(time.perf_counter() - begin)
    trainer.settle()
    trainer.close()
    return losses, median(seconds[WARM_UP:])
