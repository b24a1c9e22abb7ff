"""Point-to-point messages between pipeline ranks: activations and their gradients."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pseudoreal_trainer.engine.ranks.process_groups import ProcessGroups
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.plan.records import Flow, Receive, Send

Key = tuple[Flow, int, int]
"""Flow, position and micro-batch."""


@dataclass(frozen=True)
class _Incoming:
    """A message being received."""

    buffer: Tensor
    work: dist.Work
    begin: int
    """Start of the receive, in nanoseconds of time.perf_counter_ns."""
    record: Receive


class Messages:
    """Sends and receives the messages of a rank."""

    def __init__(self, groups: ProcessGroups, dtype: torch.dtype, trace: Trace) -> None:
        self._groups, self._dtype, self._trace = groups, dtype, trace
        self._heartbeat, self._positions = groups.ranks.heartbeat, groups.layout.head + 1
        self._sent: dict[Key, tuple[dist.Work, Tensor]] = {}
        self._incoming: dict[Key, _Incoming] = {}

    def send(self, record: Send, tensor: Tensor) -> None:
        """Start to send a tensor to another pipeline rank."""
        self._forget_arrived()
        payload = tensor.contiguous()
        here = self._groups.pipeline_rank
        with self._trace.span("send", record):
            work = dist.isend(
                payload,
                self._groups.world_rank(record.peer),
                group=self._groups.p2p.get((record.flow, here, record.peer)),
                tag=tag_of(record, self._positions),
            )
        assert work is not None, "this rank is part of the group"
        # Keep the handle and the tensor until the peer has received the message: without the handle, the peer might
        # wait forever.
        self._sent[record.flow, record.position, record.micro_batch] = (work, payload)
        self._trace.count_bytes("pipeline", payload.nbytes)

    def receive(self, record: Receive, shape: tuple[int, ...]) -> None:
        """Start to receive a tensor of this shape; `take` waits for it."""
        buffer = torch.empty(shape, dtype=self._dtype, device=self._groups.device)
        here = self._groups.pipeline_rank
        work = dist.irecv(
            buffer,
            self._groups.world_rank(record.peer),
            group=self._groups.p2p.get((record.flow, record.peer, here)),
            tag=tag_of(record, self._positions),
        )
        assert work is not None, "this rank is part of the group"
        self._incoming[record.flow, record.position, record.micro_batch] = _Incoming(
            buffer, work, time.perf_counter_ns(), record
        )

    def take(self, key: Key) -> Tensor:
        """Wait for a received tensor and return it, [B, T, H]."""
        incoming = self._incoming.pop(key)
        with self._heartbeat.waiting(f"receives {_described(incoming.record)}"):
            incoming.work.wait()
            if incoming.record.flow is Flow.GRADIENT:
                self._forget_answered(incoming.record)
        self._trace.add("receive", incoming.begin, incoming.record)
        return incoming.buffer

    def finish(self) -> None:
        """Wait until the other ranks have received everything that this rank sent."""
        if self._sent:
            with self._heartbeat.waiting("waits for its messages to arrive"):
                for work, _ in self._sent.values():
                    work.wait()
        self._sent.clear()

    def _forget_arrived(self) -> None:
        """Free the messages that are known to have arrived. NCCL reports completion by itself; gloo reports completion
        only to a waiting thread."""
        for key in [key for key, (work, _) in self._sent.items() if work.is_completed()]:
            del self._sent[key]

    def _forget_answered(self, record: Receive) -> None:
        """Free the activation whose gradient has arrived. The peer has used the activation, so the wait for the send
        ends at once."""
        answered = self._sent.pop((Flow.ACTIVATION, record.position, record.micro_batch), None)
        if answered is not None:
            answered[0].wait()


def _described(record: Receive) -> str:
    return f"{record.flow.value} {record.position}, micro-batch {record.micro_batch}"


_NUMBERS = 2**30
"""Number of tags per flow: a tag is a C int, and one of its bits is the flow."""


def tag_of(record: Send | Receive, positions: int) -> int:
    """Return the tag of a message for both ends, in a chain of `positions` positions: at most 2^31 - 1.

    Two messages have the same tag only if at least 2^30 / positions micro-batches lie between them. Even then, each is
    received correctly: the plan's check proves that a channel receives in the order of the sends, and gloo matches
    messages with one tag in this order.
    """
    number = (record.micro_batch * positions + record.position) % _NUMBERS
    return number << 1 | (0 if record.flow is Flow.ACTIVATION else 1)
