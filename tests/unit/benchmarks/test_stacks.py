"""Stacks of the benchmark that do not need DeepSpeed train identically on two ranks."""

from pathlib import Path

import pytest
import torch
from pseudoreal_api.spec.model import Attention, FeedForward, Model

from benchmarks.agreement import TOLERANCE
from benchmarks.rank import measured
from benchmarks.stacks.registry import STACKS
from benchmarks.work import Work, noisy_sequences
from tests.support.forked import run_ranks

MODEL = Model(
    layers=2, hidden_size=16, attention=Attention(heads=2), sequence_length=8, feed_forward=FeedForward(size=32)
)
OURS_AND_TORCH = [name for name in STACKS if not name.startswith("DeepSpeed")]
Losses = dict[bool, dict[str, list[float]]]
"""With and without recomputation: stack -> loss of each step."""


def _train(rank: int, folder: str) -> None:
    found: Losses = {}
    for recompute in (False, True):
        work = Work(MODEL, 7, noisy_sequences(3, 8, MODEL.sequence_length + 1, 7), micro_batches=2, recompute=recompute)
        found[recompute] = {
            name: [step.loss for step in measured(STACKS[name](work, rank, 2), 2)] for name in OURS_AND_TORCH
        }
    torch.save(found, Path(folder) / f"{rank}.pt")


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    folder = tmp_path_factory.mktemp("stacks")
    run_ranks(_train, 2, str(folder))
    found: Losses = torch.load(folder / "0.pt")
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_all_stacks_have_the_same_losses(recompute: bool, losses: Losses) -> None:
    assert len(losses[recompute]) == 8
    for name, found in losses[recompute].items():
        assert found == pytest.approx(losses[recompute]["fully_shard"], rel=TOLERANCE), name
