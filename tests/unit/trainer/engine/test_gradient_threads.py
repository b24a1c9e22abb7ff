"""The side threads: their concurrent work, and that none waits for a thread that has failed."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pseudoreal_trainer.engine.gradients import Gradients, ReductionThread, UpdateThread
from pseudoreal_trainer.engine.ranks.process_groups import ProcessGroups
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.engine.ranks.streams import Streams
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.router_statistics import NO_ROUTER_STATISTICS
from pseudoreal_trainer.engine.state.memory import Shard
from pseudoreal_trainer.engine.state.store import GradientBuffer, NewestUpdates
from pseudoreal_trainer.model.loss import Losses
from pseudoreal_trainer.plan.records import Agree, Reduce, Update
from pseudoreal_trainer.plan.units import units_of
from pseudoreal_trainer.plan.update_ranges import UpdateRange
from torch import Tensor

from tests.unit.trainer.engine.support.cases import Case

CPU = torch.device("cpu")
LENGTH, BUFFERS = 4, 2
PATIENCE = 60.0
SHARD = Shard(0, LENGTH, (UpdateRange(0, LENGTH),), torch.float32, torch.float32, torch.float32)


@dataclass
class _State:
    """State of a unit on the host that records its calls."""

    unit: int
    log: list[tuple[str, int]]
    kept: threading.Event = field(default_factory=threading.Event)
    may_update: threading.Event = field(default_factory=threading.Event)
    shard: Shard = SHARD
    failure: BaseException | None = None

    def gradient_memory(self) -> None:
        return None

    def keep_gradient(self, _: Tensor) -> None:
        if self.failure is not None:
            raise self.failure
        self.log.append(("keeps", self.unit))
        self.kept.set()

    def update(self, *_: Any) -> None:
        self.log.append(("begins to update", self.unit))
        assert self.may_update.wait(PATIENCE)
        self.log.append(("is updated", self.unit))


@dataclass
class _Rank:
    """Side threads of an engine, on one rank without a model."""

    case: Case
    log: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        groups, units = ProcessGroups(self.case.layout, Ranks(0, 1, CPU)), units_of(self.case.model, self.case.sharing)
        self.heartbeat = groups.ranks.heartbeat
        self.states: dict[int, Any] = {unit: _State(unit, self.log) for unit in range(len(units))}
        modules, streams, trace = Mock(), Streams(CPU), Trace(0)
        modules.of.return_value.views = lambda flat: [flat]
        self.buffers = [GradientBuffer(torch.empty(LENGTH)) for _ in range(BUFFERS)]
        store: Any = SimpleNamespace(
            units=units,
            states=self.states,
            updates=NewestUpdates(self.states),
            whole_gradients={},
            gradient_rounding=None,
            gradient_buffers={unit: self.buffers[unit % BUFFERS] for unit in self.states},
        )
        self.gradients = Gradients(store, modules, groups, streams, trace)
        self.reductions = ReductionThread(self.case.optimizer, store, groups, streams, trace)
        self.updates = UpdateThread(self.case.optimizer, store, self.reductions, groups, streams, trace)
        self.reductions.begin_step(1)
        self.reductions.request_agreement(
            Agree(), Losses(torch.tensor(1.0), None), NO_ROUTER_STATISTICS, stop=False, finish=False
        )

    def backward(self, unit: int) -> None:
        """Run the records of a backward pass and its reduction and update, in a plan without global clipping."""
        self.gradients.accumulate(unit, [torch.ones(LENGTH)])
        self.reductions.await_reduction(
            Reduce(unit), self.gradients.launch_reduction(unit), self.updates.before_next_gradient
        )
        self.updates.update(Update(unit), 0.1)

    def close(self) -> None:
        for state in self.states.values():
            state.may_update.set()
        self.reductions.close()
        self.updates.close()


@pytest.fixture
def rank() -> Iterator[_Rank]:
    found = _Rank(Case(homes="h", clipping="PerUnit"))
    yield found
    found.close()


def _assert_ends(act: Callable[[], Any]) -> None:
    """Assert that the call ends, whatever it raises."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it waits for ever"


def test_a_gradient_is_kept_and_its_buffer_given_back_while_another_unit_is_updated(rank: _Rank) -> None:
    rank.backward(5)
    assert rank.states[5].kept.wait(PATIENCE)
    rank.backward(4)
    assert rank.states[4].kept.wait(PATIENCE)
    for buffer in rank.buffers:
        rank.heartbeat.join(buffer.take(), rank.heartbeat.reductions)
    assert ("is updated", 5) not in rank.log


def test_a_gradient_buffer_serves_waiting_callers_in_order() -> None:
    buffer = GradientBuffer(torch.empty(LENGTH))
    memory = buffer.take().result()
    first, second = buffer.take(), buffer.take()
    assert not first.done()
    buffer.give_back(memory)
    assert first.result(0) is memory
    assert not second.done()
    buffer.give_back(memory)
    assert second.result(0) is memory
    buffer.give_back(memory)
    assert buffer.take().result(0) is memory


def test_the_memory_plan_limits_the_number_of_kept_gradients(rank: _Rank) -> None:
    for unit in (5, 4):
        rank.backward(unit)
        # Until the unit's buffer is free again.
        buffer = rank.buffers[unit % BUFFERS]
        buffer.give_back(rank.heartbeat.join(buffer.take(), rank.heartbeat.reductions))
    rank.backward(3)
    assert ("keeps", 3) not in rank.log
    rank.states[5].may_update.set()
    assert rank.states[3].kept.wait(PATIENCE)
    assert rank.log.index(("is updated", 5)) < rank.log.index(("keeps", 3))


def test_the_main_thread_does_not_wait_for_a_buffer_after_a_failure(rank: _Rank) -> None:
    rank.states[5].failure = OSError(5, "the disk has failed")

    raised: list[str] = []

    def run_backward_of_all_units() -> None:
        try:
            for unit in (5, 4, 3, 2, 1):
                rank.backward(unit)
        except OSError as error:
            raised.append(str(error))

    _assert_ends(run_backward_of_all_units)
    assert raised == ["[Errno 5] the disk has failed"]


def test_every_later_task_raises_the_first_failure(rank: _Rank) -> None:
    rank.states[5].failure = OSError(5, "the disk has failed")
    rank.gradients.accumulate(5, [torch.ones(LENGTH)])
    rank.reductions.await_reduction(Reduce(5), rank.gradients.launch_reduction(5), None)
    for later in (
        rank.updates.update(Update(5), 0.1),
        rank.reductions.request_agreement(Agree(), None, NO_ROUTER_STATISTICS, stop=False, finish=False),
    ):
        with pytest.raises(OSError, match="the disk has failed"):
            later.result(PATIENCE)
