"""Copies between host and device, and updates, wait for no other rank: such waits have streams of their own."""

from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from pseudoreal_trainer.engine.copies import PendingAllGather
from pseudoreal_trainer.engine.gradients import PendingReduction, ReductionThread
from pseudoreal_trainer.engine.ranks.process_groups import UnitGroups
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.engine.ranks.streams import Stream
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.plan.records import Reduce

from tests.unit.trainer.engine.support.cases import Case
from tests.unit.trainer.engine.support.recorded import COMPUTE, RecordedStreams

CPU = torch.device("cpu")
LENGTH = 4


@dataclass(frozen=True)
class _Work:
    """A collective; notes the stream that waits for it."""

    name: str
    streams: RecordedStreams
    waited: list[tuple[str, str]]

    def wait(self) -> None:
        self.waited.append((self.name, self.streams.current))

    def is_completed(self) -> bool:
        return False


@dataclass
class _Collectives:
    """Collectives that move nothing."""

    streams: RecordedStreams
    launched: list[tuple[str, str]] = field(default_factory=list)
    """(group, stream) of each launch."""
    waited: list[tuple[str, str]] = field(default_factory=list)

    def launch(self, *_: Any, group: Any, async_op: bool = False) -> _Work | None:
        self.launched.append((group, self.streams.current))
        work = _Work(group, self.streams, self.waited)
        if not async_op:
            work.wait()
            return None
        return work


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> _Collectives:
    found = _Collectives(RecordedStreams(real=True))
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
        monkeypatch.setattr(dist, name, found.launch)
    return found


def _gather(collectives: _Collectives, intra: str | None, inter: str | None, device: str) -> PendingAllGather:
    groups: Any = UnitGroups(replica_size=2 if intra else 1, intra=intra, inter=inter)  # type: ignore[arg-type]
    flat = torch.empty(4 * LENGTH, device=device)
    with collectives.streams.on(Stream.COPY_IN):
        return PendingAllGather(groups, flat, flat[:LENGTH], collectives.streams, Trace(0))


def test_a_copy_to_the_device_waits_for_no_stage_of_an_all_gather(collectives: _Collectives) -> None:
    """The second stage of an accelerator is launched at once, behind the first, on another stream than the copies."""
    gather = _gather(collectives, "intra", "inter", "meta")
    assert gather.is_launched
    assert collectives.launched == [("inter", Stream.COPY_IN.value), ("intra", Stream.GATHER.value)]
    assert collectives.waited == [("inter", Stream.GATHER.value)]
    gather.wait()
    assert collectives.waited[1:] == [("intra", COMPUTE)]


@pytest.mark.parametrize(("intra", "inter"), [("intra", None), (None, "inter")])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_passes_wait_for_the_only_stage_of_an_all_gather(
    intra: str | None, inter: str | None, device: str, collectives: _Collectives
) -> None:
    gather = _gather(collectives, intra, inter, device)
    assert gather.is_launched
    assert not collectives.waited
    gather.wait()
    assert collectives.waited == [(intra or inter, COMPUTE)]


def test_on_a_cpu_the_second_stage_is_launched_when_the_plan_needs_it(collectives: _Collectives) -> None:
    gather = _gather(collectives, "intra", "inter", "cpu")
    assert not gather.is_launched
    assert not gather.can_launch_second
    gather.wait()
    assert [group for group, _ in collectives.launched] == ["inter", "intra"]
    assert collectives.waited[-1] == ("intra", COMPUTE)


@pytest.mark.parametrize("home", ["Device", "Host"])
def test_a_gradient_is_kept_on_a_stream_that_waits_for_no_rank(home: str, collectives: _Collectives) -> None:
    streams, kept = collectives.streams, []
    state = Mock(shard=Mock(balancing=slice(LENGTH, LENGTH)))
    summed = torch.ones(LENGTH)
    state.shard.gradient = summed.dtype
    state.keep_gradient = lambda _: kept.append(streams.current)
    case = Case(data=2, clipping="Global")
    layout = Mock(home=lambda _: home, clipping="Global")
    groups = Mock(layout=layout, ranks=Ranks(0, 2, CPU), device=CPU, tensor_rank=0)
    groups.unit_groups.return_value = UnitGroups(inter_reduce="inter")  # type: ignore[arg-type]
    store: Any = Mock(states={1: state}, gradient_rounding=None)
    thread = ReductionThread(case.optimizer, store, groups, streams, Trace(0))
    work: Any = _Work("intra", streams, collectives.waited)
    pending = PendingReduction(1, summed, torch.ones(2 * LENGTH), streams.record_event(), work, None)
    thread._finish_reduction(Reduce(1), pending, None)
    thread.close()
    assert collectives.waited == [("intra", Stream.REDUCTION.value), ("inter", Stream.REDUCTION.value)]
    assert kept == [Stream.UPDATE.value if home == "Device" else Stream.COPY_OUT.value]
    reduced = [event for call, event in streams.log if call == "wait_event"][-1]
    assert reduced.stream == Stream.REDUCTION.value, "the gradient is complete before it is kept"
    last = streams.log[-1]
    assert last == ("synchronize", last[1])
    assert last[1].stream == kept[0], "the thread waits for the copy"
