"""Peak tensor bytes of a step on each rank of a pipeline, as recorded by the allocator."""

import json
from pathlib import Path

import torch
from pseudoreal_trainer.engine.passes import Training
from pseudoreal_trainer.engine.ranks.ranks import Ranks

from tests.unit.trainer.engine.support.cases import RATE, Case
from tests.unit.trainer.engine.support.running import CaseBatch, make_engine
from tests.unit.trainer.plan.memory.support.allocations import allocated


def measure(rank: int, cases: list[Case], folder: Path) -> None:
    """Write the peak bytes of all cases, in their order, into this rank's file."""
    own = folder / str(rank)
    own.mkdir()
    (folder / f"{rank}.json").write_text(json.dumps([_most(rank, case, own) for case in cases]))


def _most(rank: int, case: Case, folder: Path) -> int:
    engine = make_engine(case, Ranks(rank, case.world, torch.device("cpu")), folder)
    batch = CaseBatch(case, 0, 0, torch.device("cpu"))

    def step() -> None:
        engine.train(batch, Training(100, RATE, stop=False), 1)
        engine.state.wait_for_updates()

    step()
    # In some steps, memory held by other threads adds to the peak; the minimum excludes it.
    most = min(allocated(step, folder).tensors for _ in range(3))
    engine.close()
    return most
