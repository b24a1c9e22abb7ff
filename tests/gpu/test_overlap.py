"""Copies and updates go on while the GPU computes: by what torch's profiler saw on its streams."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from pseudoreal_api.model_spec import FeedForward, Model
from pseudoreal_trainer.engine.ranks import Ranks
from pseudoreal_trainer.engine.runner import Training

from tests.gpu.timeline import Span, Timeline, record, shared
from tests.unit.trainer.engine.cases import RATE, Case
from tests.unit.trainer.engine.ranks import CaseBatch, make_engine
from tests.unit.trainer.engine.reference import batch_of

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class LargeCase(Case):
    """Large enough that its copies and passes take longer than their calls: 25 MB for each block."""

    @property
    def model(self) -> Model:
        return Model(layers=self.layers, hidden=1024, heads=16, sequence=512, ffn=FeedForward(hidden=4096))


@pytest.mark.parametrize("home", ["h", "D"])
def test_copies_and_updates_overlap_compute(home: str, gpu: torch.device, tmp_path: Path) -> None:
    case = LargeCase(homes=home, layers=8, micro_batches=4, precision="bfloat16")
    engine = make_engine(case, Ranks(0, 1, gpu), tmp_path)
    tokens = batch_of(case, 0)[:, :, 1:].numel()

    def steps(numbers: range) -> None:
        for step in numbers:
            engine.train(CaseBatch(case, step, 0, gpu), Training(tokens, RATE, stop=False), step)
        engine.settle()

    steps(range(2))
    engine.trace.events.clear()
    timeline = record(lambda: steps(range(2, 5)), tmp_path / "profile.json")
    _check(timeline, timeline.of_host(engine.trace.events, "Update"))
    engine.close()


def _check(timeline: Timeline, updates: list[Span]) -> None:
    overlaps = {
        "copies to the device": shared(timeline.to_device, timeline.kernels),
        "copies to the host": shared(timeline.to_host, timeline.kernels),
        "updates on the host": shared(updates, timeline.kernels),
    }
    busy = shared(timeline.kernels, timeline.kernels)
    print({what: f"{overlap / busy:.0%} of the time in which kernels run" for what, overlap in overlaps.items()})
    assert all(overlap > 0 for overlap in overlaps.values()), overlaps
    # Passes of a block take several times as long as its copies, which may show at the ends of a step alone.
    for copies in (timeline.to_device, timeline.to_host):
        hidden = shared(copies, timeline.kernels) / shared(copies, copies)
        assert hidden >= 0.5, overlaps
