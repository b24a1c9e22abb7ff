"""Gradients of units while they grow, and the start of their sum over the data ranks."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pseudoreal_trainer.engine.modules import Modules
from pseudoreal_trainer.engine.ranks.grid import Grid
from pseudoreal_trainer.engine.ranks.lanes import Lane, Lanes, Mark
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.state.memory import State


@dataclass(frozen=True)
class Reduction:
    """A sum of one unit's gradient over the data ranks that is under way."""

    unit: int
    result: Tensor
    """This rank's part of the sum, [length of its state], in the master type. It may be read when `work` is done, after
    `mark`."""
    grown: Mark
    """The mark after which the passes of this rank have made the gradient: before the sum over the ranks begins."""
    work: dist.Work | None
    mark: Mark
    """The mark after which the gradient is summed."""
    buffer: Tensor | None
    """The buffer that the result lies in or was summed from, to be given back; None: the gradient has room of its
    own."""


@dataclass
class GrowingGradient:
    """A gradient to which micro-batch after micro-batch adds its part."""

    flat: Tensor
    """Room for the gradient, [padded numel], in the master type; the first micro-batch overwrites what was in it."""
    views: list[Tensor]
    """Views of `flat`, one for each parameter, with its shape."""
    buffer: Tensor | None = None
    """The buffer that `flat` is a part of, to be given back; None: the gradient has room of its own."""
    _begun: bool = False

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Adds the gradients of one micro-batch: one for each parameter, in their order and with their shapes, in the
        compute type."""
        for view, gradient in zip(self.views, gradients, strict=True):
            if self._begun:
                view.add_(gradient)
            else:
                view.copy_(gradient)
        if not self._begun:
            self.flat[sum(view.numel() for view in self.views) :].zero_()
            self._begun = True


class Buffers:
    """Room for the gradients of some units at a time. Only the main thread takes a buffer; only the thread that reduces
    gives one back."""

    def __init__(self, numel: int, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self._free = [torch.empty(numel, dtype=dtype, device=device) for _ in range(count)]
        self._asked: deque[Future[Tensor]] = deque()
        """Futures of those who found none free."""
        self._lock = threading.Lock()

    def take(self) -> Future[Tensor]:
        """A buffer, [numel]: at once where one is free, otherwise when the next one is given back."""
        taken: Future[Tensor] = Future()
        with self._lock:
            if self._free:
                taken.set_result(self._free.pop())
            else:
                self._asked.append(taken)
        return taken

    def give_back(self, buffer: Tensor) -> None:
        with self._lock:
            if self._asked:
                self._asked.popleft().set_result(buffer)
            else:
                self._free.append(buffer)


class Gradients:
    """Gradients of the units of a rank, in the master type."""

    def __init__(
        self,
        grid: Grid,
        modules: Modules,
        states: Mapping[int, State],
        whole: Mapping[int, Tensor],
        buffers: Buffers,
        lanes: Lanes,
        trace: Trace,
    ) -> None:
        """`whole`: unit -> room of its own, [padded numel]; the gradients of the other units share `buffers`."""
        self._grid, self._layout, self._modules, self._states = grid, grid.layout, modules, states
        self._whole, self._buffers, self._lanes, self._trace = whole, buffers, lanes, trace
        self._heartbeat = grid.ranks.heartbeat
        self._growing: dict[int, GrowingGradient] = {}

    def accumulate(self, unit: int, gradients: Sequence[Tensor]) -> None:
        """Adds one micro-batch's gradients of the unit's parameters, in the order and shapes of the parameters, in the
        compute type."""
        if unit not in self._growing:
            self._growing[unit] = self._begin(unit)
        self._growing[unit].add(gradients)

    def reduce(self, unit: int) -> Reduction:
        """Ends the gradient of a unit and starts its sum over the data ranks. All data ranks call this in the plan's
        order."""
        growing, grown = self._growing.pop(unit), self._lanes.mark()
        with self._lanes.on(Lane.COLLECTIVE):
            self._lanes.follow(grown)
            # Called by the main thread, in the plan's order on all data ranks; the thread of reductions only waits for
            # it.
            result, work = self._sum(unit, growing.flat)
            return Reduction(unit, result, grown, work, self._lanes.mark(), growing.buffer)

    def give_back(self, reduction: Reduction) -> None:
        """Gives back the buffer of a reduction whose result is no longer needed."""
        if reduction.buffer is not None:
            self._buffers.give_back(reduction.buffer)

    def _begin(self, unit: int) -> "GrowingGradient":
        buffer = None if unit in self._whole else self._free_buffer()
        flat = self._whole[unit] if buffer is None else buffer[: self._length(unit) * self._layout.shards]
        return GrowingGradient(flat, self._modules.of(unit).views(flat), buffer)

    def _free_buffer(self) -> Tensor:
        return self._heartbeat.join(self._buffers.take(), self._heartbeat.reductions)

    def _length(self, unit: int) -> int:
        return self._states[unit].extent.length

    def _sum(self, unit: int, flat: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Starts the sum of `flat`, [padded numel], over the data ranks: this rank's part of it, and the work to wait
        for."""
        group, ranks = self._grid.data, self._layout.data
        if group is None:
            return flat, None
        if self._layout.shards == 1:
            self._trace.move("collective", flat.nbytes * 2 * (ranks - 1) // ranks)
            return flat, dist.all_reduce(flat, group=group, async_op=True)
        result = self._room_for_result(unit, flat)
        self._trace.move("collective", result.nbytes * (ranks - 1))
        return result, dist.reduce_scatter_tensor(result, flat, group=group, async_op=True)

    def _room_for_result(self, unit: int, flat: Tensor) -> Tensor:
        """Room for this rank's part of the sum: where the gradient stays, if that is on the device; else a vector of
        its own."""
        kept = self._states[unit].gradient_room()
        if kept is not None and kept.device == flat.device:
            return kept
        return torch.empty(self._length(unit), dtype=flat.dtype, device=flat.device)
