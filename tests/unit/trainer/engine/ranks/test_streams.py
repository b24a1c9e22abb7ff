"""Distance of a rank's calls from its GPU, and the tensors of a stash on device and host, with fake streams."""

import gc
import weakref
from collections import deque
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pseudoreal_trainer.engine.activation_offload import ActivationOffload
from pseudoreal_trainer.engine.executor import StepExecutor
from pseudoreal_trainer.engine.passes import PlanRun, Training
from pseudoreal_trainer.engine.ranks.messages import Messages
from pseudoreal_trainer.engine.ranks.process_groups import ProcessGroups
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.engine.ranks.streams import RunAheadLimit, Stream, Streams
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.state.pinned import PlainMemory
from pseudoreal_trainer.engine.warm_up import WarmUp
from pseudoreal_trainer.plan.lower import step_plan
from pseudoreal_trainer.plan.memory.activations import PENDING_OFFLOADS, activation_peak, max_offloaded_activations
from pseudoreal_trainer.plan.records import Flow, Forward, Receive, Send, Stash, Unstash

from tests.unit.trainer.engine.support.cases import RATE, Case
from tests.unit.trainer.engine.support.recorded import COMPUTE, RecordedEvent, RecordedStreams
from tests.unit.trainer.engine.support.running import CaseBatch, make_engine
from tests.unit.trainer.plan.memory.support.sizes_of_case import sizes_of

CPU = torch.device("cpu")


@pytest.fixture
def streams() -> RecordedStreams:
    return RecordedStreams()


def _synchronized_events(streams: RecordedStreams) -> list[Any]:
    return [who for what, who in streams.log if what == "synchronize"]


def test_run_ahead_limit_waits_for_the_pass_two_passes_earlier(streams: RecordedStreams) -> None:
    limit, events = RunAheadLimit(streams, 2), []
    for number in range(5):
        limit.pass_launched()
        events.append(streams.log[-1 if number < 2 else -2][1])
        assert _synchronized_events(streams) == events[: max(0, number - 1)], (
            "those of passes, in their order, and none too early"
        )
    assert {event.stream for event in events} == {COMPUTE}


def test_run_ahead_is_unlimited_without_offload_and_pipeline(streams: RecordedStreams) -> None:
    limit = RunAheadLimit(streams, None)
    limit.pass_launched()
    assert not streams.log


def _make_offload(streams: RecordedStreams, count: int) -> ActivationOffload:
    stashed = ActivationOffload(streams, Trace(0), PlainMemory(), CPU)
    stashed.prepare(count, 4, torch.float32)
    return stashed


def test_activation_offload_keeps_a_tensor_until_its_copy_is_done(streams: RecordedStreams) -> None:
    stashed, tensors = _make_offload(streams, 6), []
    for m in range(6):
        inputs = [torch.full((1, 2, 2), float(m))]
        tensors.append(weakref.ref(inputs[0]))
        stashed.stash(Stash(1, m), inputs.pop())
        gc.collect()
        assert sum(tensor() is not None for tensor in tensors) <= PENDING_OFFLOADS
        assert len(_synchronized_events(streams)) == max(0, m + 1 - PENDING_OFFLOADS)
    assert {event.stream for event in _synchronized_events(streams)} == {Stream.COPY_OUT.value}, (
        "it waits for copies, not for passes"
    )
    stashed.finish()
    assert not any(tensor() is not None for tensor in tensors)


def test_activation_offload_keeps_a_tensor_while_it_waits_for_the_copy(
    streams: RecordedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the allocator would give the tensor's memory away, and the copy would read other content."""
    stashed, tensors, alive = _make_offload(streams, 6), deque[Any](), []
    monkeypatch.setattr(RecordedEvent, "synchronize", lambda _: alive.append(tensors.popleft()() is not None))
    for m in range(6):
        inputs = [torch.full((1, 2, 2), float(m))]
        tensors.append(weakref.ref(inputs[0]))
        stashed.stash(Stash(1, m), inputs.pop())
    stashed.finish()
    assert alive == [True] * 6


def test_reloaded_activations_are_equal_and_their_host_buffer_is_reused_after_the_copy(
    streams: RecordedStreams,
) -> None:
    stashed = _make_offload(streams, 1)
    for m in range(3):
        stashed.stash(Stash(1, m), torch.full((1, 2, 2), float(m)))
        stashed.unstash(Unstash(1, m))
        returned = next(who for what, who in reversed(streams.log) if what == "record_event")
        assert returned.stream == Stream.COPY_IN.value
        again = stashed.take_reloaded((1, m))
        assert again is not None
        assert torch.equal(again, torch.full((1, 2, 2), float(m)))
        assert streams.log[-1] == ("wait_event", returned), "compute waits for the copy"
    followed_by_copies = [who for what, who in streams.log if what == "wait_event" and who is not None]
    returns = [who for who in followed_by_copies if who.stream == Stream.COPY_IN.value]
    assert len(returns) == 3 + 2, "a copy to the host waits until the buffer has been read"


@pytest.mark.parametrize("order", ["Layered", "1F1B", "GPipe"])
def test_activation_offload_allocates_the_planned_bytes_once(order: str, tmp_path: Path) -> None:
    case = Case(stash=True, order=order, micro_batches=4)
    engine = make_engine(case, Ranks(0, 1, CPU), tmp_path)
    stashed, (plan,) = engine._executor._offload, step_plan(case.layout)
    buffers: list[set[int]] = []
    for step in range(2):
        engine.train(CaseBatch(case, step, 0, CPU), Training(96, RATE, stop=False), step)
        buffers.append({buffer.data_ptr() for buffer, _ in stashed._free})
        held = sum(buffer.nbytes for buffer, _ in stashed._free)
        assert held == activation_peak(case.layout, sizes_of(case), 0, plan).host
    engine.close()
    assert buffers[0] == buffers[1], "made once"
    assert len(buffers[0]) == max_offloaded_activations(plan)


def _messages(completed: bool) -> tuple[Messages, Mock]:
    work = Mock()
    work.is_completed.return_value = completed
    case = Case(pipeline=2)
    groups = Mock(layout=case.layout, ranks=Ranks(0, 2, CPU), pipeline_rank=0, p2p={}, device=CPU)
    return Messages(groups, torch.float32, Trace(0)), work


def _send(messages: Messages, m: int, work: Mock, monkeypatch: pytest.MonkeyPatch) -> "weakref.ref[torch.Tensor]":
    monkeypatch.setattr(torch.distributed, "isend", lambda *_, **__: work)
    payload = torch.ones(1, 2, 2)
    messages.send(Send(Flow.ACTIVATION, 2, m, 1), payload)
    return weakref.ref(payload)


def test_a_received_message_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL reports that a message was received."""
    messages, work = _messages(completed=True)
    first = _send(messages, 0, work, monkeypatch)
    assert first() is not None
    second = _send(messages, 1, work, monkeypatch)
    assert first() is None
    assert second() is not None


def test_a_message_is_freed_once_its_gradient_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo reports nothing before the message is waited for."""
    messages, work = _messages(completed=False)
    tensors = [_send(messages, m, work, monkeypatch) for m in range(2)]
    assert all(tensor() is not None for tensor in tensors)
    monkeypatch.setattr(torch.distributed, "irecv", lambda *_, **__: Mock())
    messages.receive(Receive(Flow.GRADIENT, 2, 0, 1), (1, 2, 2))
    messages.take((Flow.GRADIENT, 2, 0))
    assert [tensor() is not None for tensor in tensors] == [False, True]
    work.wait.assert_called_once()


def test_memory_plan_excludes_answered_messages() -> None:
    """A first stage of 1F1B holds the messages in flight, not all messages that it ever sent."""
    peaks = []
    for count in (8, 16):
        case = Case(pipeline=2, order="1F1B", micro_batches=count)
        steps = step_plan(case.layout)[0]
        peaks.append(activation_peak(case.layout, sizes_of(case), 0, steps).device)
    assert peaks[0] == peaks[1]


def test_passes_are_warmed_up_before_the_first_receive() -> None:
    done: list[object] = []
    rank = Mock(_layout=Case(pipeline=2).layout, _streams=RecordedStreams(real=True))
    rank._warm_up.run = lambda *_: done.append("warm")
    rank._prepare = lambda *arguments: StepExecutor._prepare(rank, *arguments)
    rank._execute = lambda record, _: done.append(record)
    StepExecutor.execute(rank, (Receive(Flow.ACTIVATION, 2, 0, 0), Forward(2, 0)), Mock(training=None))
    assert done[0] == "warm"
    assert len(done) == 3


def test_expert_parallel_passes_are_warmed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank is one of two, and needs the other for nothing."""
    case = Case(data=2, expert_ranks=2, options="Mixtral")
    monkeypatch.setattr(
        "tests.unit.trainer.engine.support.running.process_groups_of",
        lambda layout, ranks: ProcessGroups(layout, ranks),
    )
    engine = make_engine(case, Ranks(1, 2, CPU), tmp_path)
    batch = CaseBatch(case, 0, 1, CPU)
    warm_up = WarmUp(engine._executor._passes)
    warm_up.run(PlanRun(batch, None), step_plan(case.layout)[0])
    assert warm_up._done == {batch.shape(0)}
    engine._executor.close()


def test_passes_are_warmed_up_once_per_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warming up ends with a wait for all kernels of the device, which would cost time in every step."""
    waits: list[torch.device] = []
    case = Case(precision="float32")
    engine = make_engine(case, Ranks(0, 1, CPU), tmp_path)
    monkeypatch.setattr(Streams, "are_real", True)
    for module in (torch.cuda, torch.accelerator):
        monkeypatch.setattr(module, "synchronize", waits.append)
    for step in range(2):
        engine._executor._warm_up.run(PlanRun(CaseBatch(case, step, 0, CPU), None), step_plan(case.layout)[0])
    assert waits == [CPU]
    engine.close()


@pytest.mark.parametrize(
    "case",
    [Case(precision="float32"), Case(precision="float32", experts=6, homes="h"), Case(precision="float32", tied=True)],
)
def test_warming_up_changes_no_loss(case: Case, tmp_path: Path) -> None:
    losses: list[list[float]] = []
    for warm in (False, True):
        engine = make_engine(case, Ranks(0, 1, CPU), tmp_path)
        batch = CaseBatch(case, 0, 0, CPU)
        losses.append([])
        for step in range(2):
            if warm:
                engine._executor._warm_up.run(PlanRun(batch, None), step_plan(case.layout)[0])
            losses[-1].append(engine.train(batch, Training(96, RATE, stop=False), step).loss_sum)
        assert engine._executor._warm_up._done == ({batch.shape(0)} if warm else set())
        engine.close()
    assert losses[0] == losses[1]
