"""Activations and gradients on their way between pipeline ranks."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pseudoreal_trainer.engine.grid import Grid
from pseudoreal_trainer.engine.trace import Trace
from pseudoreal_trainer.plan.steps import Flow, Receive, Send

Key = tuple[Flow, int, int]
"""Flow, position, micro-batch."""


@dataclass(frozen=True)
class _Incoming:
    buffer: Tensor
    work: dist.Work
    begin: int
    step: Receive


class Messages:
    """Those that a rank sends and awaits."""

    def __init__(self, grid: Grid, dtype: torch.dtype, trace: Trace) -> None:
        self._grid, self._dtype, self._trace = grid, dtype, trace
        self._stamps = grid.ranks.stamps
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self._incoming: dict[Key, _Incoming] = {}

    def send(self, step: Send, tensor: Tensor) -> None:
        payload = tensor.contiguous()
        here = self._grid.pipeline_rank
        with self._trace.span("send", step):
            work = dist.isend(
                payload,
                self._grid.world_rank(step.peer),
                group=self._grid.channels.get((step.flow, here, step.peer)),
                tag=_tag(step),
            )
        assert work is not None, "this rank is part of the group"
        # The handle and the tensor live until the peer has it all: a dropped handle may leave the peer waiting.
        self._sent.append((work, payload))
        self._trace.move("pipeline", payload.nbytes)

    def receive(self, step: Receive, shape: tuple[int, ...]) -> None:
        buffer = torch.empty(shape, dtype=self._dtype, device=self._grid.device)
        here = self._grid.pipeline_rank
        work = dist.irecv(
            buffer,
            self._grid.world_rank(step.peer),
            group=self._grid.channels.get((step.flow, step.peer, here)),
            tag=_tag(step),
        )
        assert work is not None, "this rank is part of the group"
        self._incoming[step.flow, step.position, step.micro_batch] = _Incoming(
            buffer, work, time.perf_counter_ns(), step
        )

    def take(self, key: Key) -> Tensor:
        """What was received; waits for it."""
        incoming = self._incoming.pop(key)
        with self._stamps.wait(f"receives {_described(incoming.step)}"):
            incoming.work.wait()
        self._trace.add("receive", incoming.begin, incoming.step)
        return incoming.buffer

    def arrives(self, key: Key) -> bool:
        return key in self._incoming

    def finish(self) -> None:
        """Waits until all that was sent has been received."""
        if self._sent:
            with self._stamps.wait("all that was sent arrives"):
                for work, _ in self._sent:
                    work.wait()
        self._sent.clear()


def _described(step: Receive) -> str:
    return f"{step.flow.value} {step.position}, micro-batch {step.micro_batch}"


def _tag(step: Send | Receive) -> int:
    flow = 0 if step.flow is Flow.ACTIVATION else 1
    return (step.micro_batch << 16 | step.position) << 1 | flow
