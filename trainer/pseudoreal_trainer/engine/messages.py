"""Activations and gradients on their way between pipeline ranks."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pseudoreal_trainer.engine.ranks.grid import Grid
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.plan.steps import Flow, Receive, Send

Key = tuple[Flow, int, int]
"""A flow, a position and a micro-batch."""


@dataclass(frozen=True)
class _Incoming:
    buffer: Tensor
    work: dist.Work
    begin: int
    step: Receive


class Messages:
    """The messages that a rank sends and awaits."""

    def __init__(self, grid: Grid, dtype: torch.dtype, trace: Trace) -> None:
        self._grid, self._dtype, self._trace = grid, dtype, trace
        self._heartbeat, self._positions = grid.ranks.heartbeat, grid.layout.head + 1
        self._sent: dict[Key, tuple[dist.Work, Tensor]] = {}
        self._incoming: dict[Key, _Incoming] = {}

    def send(self, step: Send, tensor: Tensor) -> None:
        self._forget_arrived()
        payload = tensor.contiguous()
        here = self._grid.pipeline_rank
        with self._trace.span("send", step):
            work = dist.isend(
                payload,
                self._grid.world_rank(step.peer),
                group=self._grid.channels.get((step.flow, here, step.peer)),
                tag=tag_of(step, self._positions),
            )
        assert work is not None, "this rank is part of the group"
        # The handle and the tensor live until the peer has it all: a dropped handle may leave the peer waiting.
        self._sent[step.flow, step.position, step.micro_batch] = (work, payload)
        self._trace.move("pipeline", payload.nbytes)

    def receive(self, step: Receive, shape: tuple[int, ...]) -> None:
        buffer = torch.empty(shape, dtype=self._dtype, device=self._grid.device)
        here = self._grid.pipeline_rank
        work = dist.irecv(
            buffer,
            self._grid.world_rank(step.peer),
            group=self._grid.channels.get((step.flow, step.peer, here)),
            tag=tag_of(step, self._positions),
        )
        assert work is not None, "this rank is part of the group"
        self._incoming[step.flow, step.position, step.micro_batch] = _Incoming(
            buffer, work, time.perf_counter_ns(), step
        )

    def take(self, key: Key) -> Tensor:
        """The tensor that was received, [B, T, H]; waits for it."""
        incoming = self._incoming.pop(key)
        with self._heartbeat.waiting(f"receives {_described(incoming.step)}"):
            incoming.work.wait()
            if incoming.step.flow is Flow.GRADIENT:
                self._forget_answered(incoming.step)
        self._trace.add("receive", incoming.begin, incoming.step)
        return incoming.buffer

    def arrives(self, key: Key) -> bool:
        return key in self._incoming

    def finish(self) -> None:
        """Waits until all that was sent has been received."""
        if self._sent:
            with self._heartbeat.waiting("all that was sent arrives"):
                for work, _ in self._sent.values():
                    work.wait()
        self._sent.clear()

    def _forget_arrived(self) -> None:
        """Lets go of what is known to have been received. NCCL tells; gloo does not, short of waiting."""
        for key in [key for key, (work, _) in self._sent.items() if work.is_completed()]:
            del self._sent[key]

    def _forget_answered(self, step: Receive) -> None:
        """Lets go of the activation whose gradient has come back: its receiver had it, so this wait takes no time."""
        answered = self._sent.pop((Flow.ACTIVATION, step.position, step.micro_batch), None)
        if answered is not None:
            answered[0].wait()


def _described(step: Receive) -> str:
    return f"{step.flow.value} {step.position}, micro-batch {step.micro_batch}"


_NUMBERS = 2**30
"""Number of tags for each flow: a tag is a C int, and one bit of it is the flow's."""


def tag_of(step: Send | Receive, positions: int) -> int:
    """The tag by which both ends know a message, of a chain of `positions` positions: at most 2^31 - 1.

    Two messages have one tag only when at least 2^30 / positions micro-batches lie between them. They are received in
    the order in which they are sent all the same: a channel receives in the order of its sends, as the plan's check
    proves, and gloo matches messages of one tag in that order.
    """
    number = (step.micro_batch * positions + step.position) % _NUMBERS
    return number << 1 | (0 if step.flow is Flow.ACTIVATION else 1)
