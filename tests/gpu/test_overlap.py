"""Copies and updates overlap with the GPU's computation, according to torch's profiler."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from pseudoreal_api.spec.model import Attention, FeedForward, Model
from pseudoreal_trainer.engine.passes import Training
from pseudoreal_trainer.engine.ranks.ranks import Ranks

from tests.gpu.conftest import Figure
from tests.support.gpu_timeline import Timeline, record, share_of
from tests.unit.trainer.engine.support.cases import RATE, Case
from tests.unit.trainer.engine.support.reference import batch_of
from tests.unit.trainer.engine.support.running import CaseBatch, make_engine

pytestmark = pytest.mark.gpu


LEAST_HIDDEN = 0.5
"""Lower bound on the hidden share of the time of copies and of updates. A step has so many tokens that compute takes
longer than either."""


@dataclass(frozen=True)
class LargeCase(Case):
    """25 MB per block, and 64k tokens per step: 20 times the tokens that hide the copies over a link of 50 GB/s at 400
    TFLOP/s, and twice those that hide an update at 100 GB/s."""

    @property
    def model(self) -> Model:
        return Model(
            layers=self.layers,
            hidden_size=1024,
            attention=Attention(heads=16),
            sequence_length=4096,
            feed_forward=FeedForward(size=4096),
        )


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder in memory, if possible: waiting for a slow disk would mask the engine's own behaviour."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as made:
        yield Path(made)


@pytest.mark.parametrize("home", ["h", "D"])
def test_copies_and_updates_are_hidden_behind_compute(
    home: str, gpu: torch.device, folder: Path, figure: Figure
) -> None:
    case = LargeCase(homes=home, layers=8, micro_batches=4, precision="bfloat16")
    engine = make_engine(case, Ranks(0, 1, gpu), folder)
    tokens = batch_of(case, 0)[:, :, 1:].numel()

    def steps(numbers: range) -> None:
        for step in numbers:
            engine.train(CaseBatch(case, step, 0, gpu), Training(tokens, RATE, stop=False), step)
        engine.state.wait_for_updates()

    steps(range(2))
    engine.trace.events.clear()
    timeline = record(lambda: steps(range(2, 6)), folder / "profile.json")
    hidden = _hidden(timeline, engine.trace.events)
    figure(", ".join(f"{what} {share:.0%} hidden" for what, share in hidden.items()))
    engine.close()
    assert min(hidden.values()) >= LEAST_HIDDEN, hidden


def _hidden(timeline: Timeline, events: list[dict[str, Any]]) -> dict[str, float]:
    spans = {
        "copies to the device": timeline.to_device,
        "copies to the host": timeline.to_host,
        "updates on the host": timeline.of_host(events, "Update"),
    }
    return {what: share_of(some, timeline.kernels) or 0.0 for what, some in spans.items()}
