"""Every call that may block on another rank runs inside a wait that the heartbeat shows."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.data.corpus import load_corpus
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.runtime.heartbeat import Heartbeat, SideThread
from pseudoreal_trainer.training.phase import train_phase

from tests.support.forked import run_ranks
from tests.unit.trainer.engine.support.cases import Case
from tests.unit.trainer.engine.support.running import run_case

_BLOCKING = ("all_reduce", "recv", "reduce_scatter_tensor", "all_gather_into_tensor", "new_group")
_T = TypeVar("_T")
WORLD = 4
CASES = (
    Case(data=4, micro_batches=2),
    Case(data=4, sharding="Full", homes="h", window=2, clipping="PerUnit"),
    Case(pipeline=2, data=2, micro_batches=2, blocks=1, next_sharing=(4, "Cycle")),
)


class Known(Heartbeat):
    """Heartbeat that remembers which threads are inside a wait."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: Counter[int] = Counter()
        for thread in (self.reductions, self.updates, self.saving):
            thread.waiting = self.waiting  # type: ignore[assignment, method-assign]

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self.threads[threading.get_ident()] += 1
        yield
        self.threads[threading.get_ident()] -= 1

    def waiting(self, what: str) -> AbstractContextManager[object]:  # type: ignore[override]
        assert 0 < len(what) <= 64
        return self._inside()

    def join(self, future: Future[_T], thread: SideThread) -> _T:
        with self._inside():
            return super().join(future, thread)


def _watched(name: str, act: Callable[..., Any], heartbeat: Known, seen: Counter[str]) -> Callable[..., Any]:
    def acted(*arguments: Any, **named: Any) -> Any:
        if not named.get("async_op"):
            assert heartbeat.threads[threading.get_ident()], f"{name} may wait, and no heartbeat shows it"
            seen[name] += 1
        return act(*arguments, **named)

    return acted


def _rank(rank: int, folder: Path, config: PhaseConfig) -> None:
    heartbeat, seen = Known(), Counter[str]()
    for blocking in _BLOCKING:
        setattr(dist, blocking, _watched(blocking, getattr(dist, blocking), heartbeat, seen))
    dist.Work.wait = _watched("wait", dist.Work.wait, heartbeat, seen)  # type: ignore[method-assign]
    ranks = Ranks(rank, WORLD, torch.device("cpu"), heartbeat)
    for case in CASES:
        run_case(case, ranks, folder)
    train_phase(config, load_corpus(config.data, config.model.sequence_length), ranks, lambda: False)
    (folder / f"{rank}").write_text(" ".join(seen))


def test_every_wait_of_a_step_for_other_ranks_is_in_the_heartbeat(
    job_body: dict[str, Any], config: Any, tmp_path: Path
) -> None:
    job_body["spec"]["checkpoint"]["everySteps"] = 2
    job_body["spec"]["phases"][0] |= {"workers": WORLD, "batch": {"sequences": 8, "microBatches": 2}}
    run_ranks(_rank, WORLD, tmp_path, config(0))
    seen = {word for rank in range(WORLD) for word in (tmp_path / f"{rank}").read_text().split()}
    assert seen == {*_BLOCKING, "wait"}
