"""Peak tensor bytes of a step on each rank of a pipeline, as recorded by the allocator."""

import json
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pseudoreal_trainer.engine.passes import Training
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from torch import Tensor

from tests.unit.trainer.engine.support.cases import RATE, Case
from tests.unit.trainer.engine.support.running import CaseBatch, make_engine
from tests.unit.trainer.plan.memory.support.allocations import allocated


def measure(rank: int, cases: list[Case], folder: Path) -> None:
    """Write the peak bytes of all cases, in their order, into this rank's file.

    Replaces functions of torch.distributed, so it needs a process of its own.
    """
    dist.all_gather_into_tensor = _released(dist.all_gather_into_tensor)
    dist.all_to_all_single = _released(dist.all_to_all_single)
    own = folder / str(rank)
    own.mkdir()
    (folder / f"{rank}.json").write_text(json.dumps([_most(rank, case, own) for case in cases]))


def _released(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return the collective; if it blocks, it returns after gloo has released its tensors.

    A thread of gloo completes a collective, and releases its tensors a little later. If the scheduler interrupts the
    thread in between, the tensors of several collectives add to the peak.
    """

    def call(received: Tensor, sent: Tensor, *sizes: list[int], **options: Any) -> Any:
        if options.get("async_op"):
            return collective(received, sent, *sizes, **options)
        views = [received.view_as(received), sent.view_as(sent)]
        collective(*views, *sizes, **options)
        held = [weakref.ref(view) for view in views]
        del views
        # While C++ owns a tensor, its Python object lives, too.
        while any(view() is not None for view in held):
            time.sleep(1e-4)
        return None

    return call


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
