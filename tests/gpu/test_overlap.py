"""Copies and updates overlap with the GPU's computation, according to torch's profiler."""

from dataclasses import dataclass
from pathlib import Path
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
    """100 MB per block, and 64k tokens per step: 20 times the tokens that hide the copies over a link of 50 GB/s at 400
    TFLOP/s, and four times those that hide an update at 100 GB/s. Smaller kernels would end before the profiled main
    thread launches the next ones. The test has not run on a GPU with this model."""

    @property
    def model(self) -> Model:
        return Model(
            layers=self.layers,
            hidden_size=2048,
            attention=Attention(heads=16),
            sequence_length=2048,
            feed_forward=FeedForward(size=8192),
        )


def test_copies_and_updates_overlap_with_compute(gpu: torch.device, tmp_path: Path, figure: Figure) -> None:
    """With the state on the host. A disk, even one in memory, takes longer than the passes of any batch that fits."""
    case = LargeCase(homes="h", layers=8, micro_batches=4, sequences=8, precision="bfloat16")
    engine = make_engine(case, Ranks(0, 1, gpu), tmp_path)
    tokens = batch_of(case, 0)[:, :, 1:].numel()

    def steps(numbers: range) -> None:
        for step in numbers:
            engine.train(CaseBatch(case, step, 0, gpu), Training(tokens, RATE, stop=False), step)
        engine.state.wait_for_updates()

    steps(range(2))
    engine.trace.events.clear()
    timeline = record(lambda: steps(range(2, 6)), tmp_path / "profile.json")
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
