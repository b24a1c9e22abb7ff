"""An engine whose gradients are all 1; each rank contributes an equal part."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from pseudoreal_trainer.engine.gradients import Gradients
from pseudoreal_trainer.engine.passes import Training
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from torch import Tensor

from tests.unit.trainer.engine.support.cases import RATE, Case
from tests.unit.trainer.engine.support.reference import tokens_of
from tests.unit.trainer.engine.support.running import CaseBatch, make_engine


def run(rank: int, world: int, cases: list[Case], folder: Path) -> None:
    ranks = Ranks(rank, world, torch.device("cpu"))
    torch.save([_norm(case, ranks, folder) for case in cases], folder / f"{world}-{rank}.pt")


def _norm(case: Case, ranks: Ranks, folder: Path) -> float:
    """Return the norm of the whole gradient, as this rank knows it."""
    with _all_ones():
        engine = make_engine(case, ranks, folder)
        batch = CaseBatch(case, 0, ranks.rank % case.data, ranks.device)
        agreement = engine.train(batch, Training(tokens_of(case), RATE, stop=False), 0)
        engine.state.wait_for_updates()
        engine.close()
    return agreement.norm


def _all_ones() -> AbstractContextManager[object]:
    launch_sum = Gradients._launch_sum

    def put(self: Gradients, unit: int, flat: Tensor) -> Any:
        givers, trained = self._layout.holders(unit), self._store.units[unit].trained
        flat.zero_()
        flat[:trained] = 1 / givers
        return launch_sum(self, unit, flat)

    return patch.object(Gradients, "_launch_sum", put)
