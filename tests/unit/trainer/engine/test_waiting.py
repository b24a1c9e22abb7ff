"""Classification of waits as waiting for other ranks or as this rank's own work, by the order of calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pseudoreal_trainer.engine.gradients import Gradients, ReductionThread
from pseudoreal_trainer.engine.ranks.process_groups import ProcessGroups
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.router_statistics import NO_ROUTER_STATISTICS
from pseudoreal_trainer.model.loss import Losses
from pseudoreal_trainer.plan.records import Agree, Reduce

from tests.unit.trainer.engine.support.cases import Case
from tests.unit.trainer.engine.support.recorded import COMPUTE, RecordedStreams

CPU = torch.device("cpu")
UNIT = 1


class _Work:
    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self._log = log

    def wait(self) -> None:
        self._log.append(("reduction",))


@pytest.fixture
def streams() -> RecordedStreams:
    return RecordedStreams()


@pytest.fixture
def reductions(streams: RecordedStreams) -> Iterator[ReductionThread]:
    """The reduction thread of a rank that records its waits in the log of the streams."""
    ranks = Ranks(0, 1, CPU)

    @contextmanager
    def waiting(what: str) -> Iterator[None]:
        streams.log.append(("waits", what))
        yield
        streams.log.append(("goes on", what))

    ranks.heartbeat.reductions.waiting = waiting  # type: ignore[method-assign]
    case = Case()
    reductions = ReductionThread(case.optimizer, _store(Mock()), ProcessGroups(case.layout, ranks), streams, Trace(0))
    yield reductions
    reductions.close()


def _store(state: Mock) -> Any:
    """Return a store with one unit, whose gradient has its own memory."""
    unit = SimpleNamespace(replicated=())
    return SimpleNamespace(states={UNIT: state}, whole_gradients={UNIT: torch.zeros(4)}, units={UNIT: unit})


def _synchronized_on(streams: RecordedStreams, stream: str) -> int:
    return next(i for i, (what, *who) in enumerate(streams.log) if what == "synchronize" and who[0].stream == stream)


def test_waiting_for_own_passes_does_not_count_as_waiting_for_other_ranks(
    streams: RecordedStreams, reductions: ReductionThread
) -> None:
    """The sum over the ranks counts as a wait. On a GPU both are still in progress when the side thread reaches
    them."""
    modules = Mock()
    modules.of.return_value.views = lambda flat: [flat]
    state = Mock(shard=Mock(length=4))
    groups = ProcessGroups(Case().layout, Ranks(0, 1, CPU))
    gradients = Gradients(_store(state), modules, groups, streams, Trace(0))
    gradients.accumulate(UNIT, [torch.ones(4)])
    pending = gradients.launch_reduction(UNIT)
    object.__setattr__(pending, "work", _Work(streams.log))
    reductions.await_reduction(Reduce(UNIT), pending, None)
    reductions.close()
    begins = streams.log.index(("waits", f"reduces unit {UNIT}"))
    assert _synchronized_on(streams, COMPUTE) < begins < streams.log.index(("reduction",))
    assert streams.log.index(("reduction",)) < streams.log.index(("goes on", f"reduces unit {UNIT}"))


def test_the_loss_is_computed_before_the_ranks_agree_on_it(
    streams: RecordedStreams, reductions: ReductionThread
) -> None:
    reductions.request_agreement(
        Agree(), Losses(torch.tensor(1.0), None), NO_ROUTER_STATISTICS, stop=False, finish=False
    ).result()
    assert _synchronized_on(streams, COMPUTE) < streams.log.index(("waits", "agrees on the step"))
