"""The side thread: finishes reductions, agrees with the other ranks, updates units; while the main thread computes.

It does everything in the order in which it was told, which is the plan's: so all ranks call their collectives in one
order. What fails here is raised where the main thread next waits for it.
"""

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from pseudoreal_api.model_spec import Optimizer as OptimizerSpec
from torch import Tensor

from pseudoreal_trainer.engine.gradients import Gradients, Reduction
from pseudoreal_trainer.engine.grid import Grid
from pseudoreal_trainer.engine.lanes import Lane, Lanes, Mark, reach
from pseudoreal_trainer.engine.state import State
from pseudoreal_trainer.engine.trace import Trace
from pseudoreal_trainer.plan.steps import Agree, Reduce, Tie, Update

_T = TypeVar("_T")
_TINY = 1e-6
"""Keeps the clipping factor finite, as torch.nn.utils.clip_grad_norm_ does."""
_PART_ELEMENTS = 2**22
"""Of a gradient on its way through the device: 16 MiB in float32."""


@dataclass(frozen=True)
class Agreement:
    """What all ranks know of a step."""

    loss_sum: float
    """Nats, over all tokens of the batch."""
    norm: float
    """Of the whole gradient; with clipping other than global, 0."""
    stop: bool
    """Some rank was asked to."""
    finish: bool
    """Some rank was asked to."""

    @property
    def trains(self) -> bool:
        return math.isfinite(self.loss_sum) and math.isfinite(self.norm)


class Updates:
    def __init__(
        self,
        spec: OptimizerSpec,
        grid: Grid,
        states: Mapping[int, State],
        gradients: Gradients,
        lanes: Lanes,
        trace: Trace,
    ) -> None:
        self._spec, self._grid, self._layout, self._states = spec, grid, grid.layout, states
        self._gradients, self._lanes, self._trace = gradients, lanes, trace
        self._waits = grid.ranks.stamps.updates
        self._thread = ThreadPoolExecutor(1, "updates", initializer=lanes.enter_thread)
        self._failure: BaseException | None = None
        self._squares: dict[int, float] = {}
        self._agreement: Agreement | None = None
        self.holds: dict[int, Future[None]] = {}
        """Unit -> what its next update waits for."""
        self.held_seconds = 0.0
        """That updates have waited so."""

    def reduce(self, step: Reduce, reduction: Reduction) -> None:
        self._later(lambda: self._finish(step, reduction))

    def tie(self, step: Tie) -> None:
        self._later(lambda: self._tie(step))

    def agree(self, step: Agree, loss: Tensor | None, *, stop: bool, finish: bool) -> Future[Agreement]:
        """`loss`: this rank's part of the batch's sum, a scalar."""
        computed = self._lanes.mark()
        return self._later(lambda: self._agree(step, loss, computed, (stop, finish)))

    def update(self, step: Update, rate: float) -> Future[Mark]:
        hold = self.holds.pop(step.unit, None)
        return self._later(lambda: self._update(step, rate, hold))

    def close(self) -> None:
        self._thread.shutdown()

    def _later(self, task: Callable[[], _T]) -> Future[_T]:
        def run() -> _T:
            if self._failure is not None:
                raise self._failure
            try:
                return task()
            except BaseException as failure:
                self._failure = failure
                raise

        return self._thread.submit(run)

    def _finish(self, step: Reduce, reduction: Reduction) -> None:
        state, at_home = self._states[step.unit], self._layout.home(step.unit) == "device"
        with self._trace.span("reduce", step), self._lanes.on(Lane.UPDATE if at_home else Lane.COPY_OUT):
            self._await(step, reduction)
            if self._layout.clipping != "none" and len(self._layout.users[step.unit]) == 1:
                self._squares[step.unit] = _square(reduction.result)
            state.keep_gradient(reduction.result)
            if not at_home:
                self._trace.move("d2h", reduction.result.nbytes)
            # The buffer is free, and the host may read the gradient, only when the copy is made.
            reach(self._lanes.mark())
            self._gradients.give_back(reduction)

    def _await(self, step: Reduce, reduction: Reduction) -> None:
        # This rank's own kernels are its work; from here on it waits for the other ranks.
        reach(reduction.grown)
        with self._waits.wait(f"reduces unit {step.unit}"):
            if reduction.work is not None:
                reduction.work.wait()
            self._lanes.follow(reduction.mark)
            # On a GPU only this waits.
            reach(self._lanes.mark())

    def _tie(self, step: Tie) -> None:
        users, state = self._layout.users[step.unit], self._states[step.unit]
        with self._trace.span("reduce", step), self._lanes.on(Lane.UPDATE):
            gradient = state.gradient()
            with self._waits.wait(f"sums unit {step.unit} over stages"):
                sum_by_parts(gradient, self._grid.device, self._grid.ties[users])
            self._trace.move("collective", gradient.nbytes * 2 * (len(users) - 1) // len(users))
            state.keep_gradient(gradient)
            self._squares[step.unit] = _square(gradient)

    def _agree(self, step: Agree, loss: Tensor | None, computed: Mark, asked: tuple[bool, bool]) -> Agreement:
        reach(computed)
        # On a lane: what is read on that of compute waits for all passes that are called already.
        span, lane = self._trace.span("agree", step), self._lanes.on(Lane.UPDATE)
        with span, lane, self._waits.wait("agrees on the step"):
            self._lanes.follow(computed)
            square = self._own_square() if self._layout.clipping == "global" else 0.0
            values = [0.0 if loss is None else float(loss), square, *map(float, asked)]
            sums = self._summed(torch.tensor(values, dtype=torch.float64), self._grid.side_world)
            self._squares = {} if self._layout.clipping == "global" else self._squares
            self._agreement = Agreement(sums[0], math.sqrt(sums[1]), stop=sums[2] > 0, finish=sums[3] > 0)
            return self._agreement

    def _own_square(self) -> float:
        """This rank's part of the squared norm: of gradients that several ranks have, the first of them counts."""
        counted = [
            square
            for unit, square in self._squares.items()
            if self._layout.users[unit][0] == self._grid.pipeline_rank
            and (self._layout.shards > 1 or self._grid.data_rank == 0)
        ]
        return sum(counted)

    def _update(self, step: Update, rate: float, hold: Future[None] | None) -> Mark:
        agreement = self._agreement
        assert agreement is not None, "the plan agrees before it updates"
        if not agreement.trains:
            return None
        if hold is not None:
            self._wait_for(hold, step)
        with self._trace.span("update", step), self._lanes.on(Lane.UPDATE):
            self._states[step.unit].update(self._spec, rate, self._scale(step.unit, agreement))
            return self._lanes.mark()

    def _wait_for(self, hold: Future[None], step: Update) -> None:
        begin = time.perf_counter()
        with self._trace.span("checkpoint", step, "hold"):
            hold.result()
        self.held_seconds += time.perf_counter() - begin

    def _scale(self, unit: int, agreement: Agreement) -> float:
        """By clipping."""
        if self._layout.clipping == "none":
            return 1.0
        norm = agreement.norm
        if self._layout.clipping == "perUnit":
            square = torch.tensor([self._squares.pop(unit)], dtype=torch.float64)
            group = self._grid.side_data if self._layout.shards > 1 else None
            with self._waits.wait(f"sums the norm of unit {unit}"):
                norm = math.sqrt(self._summed(square, group)[0])
        return min(1.0, float(self._spec.clipping.norm) / (norm + _TINY))

    def _summed(self, values: Tensor, group: dist.ProcessGroup | None) -> list[float]:
        if group is not None:
            values = values.to(self._grid.device)
            dist.all_reduce(values, group=group)
        sums: list[float] = values.tolist()
        return sums


def sum_by_parts(gradient: Tensor, device: torch.device, group: dist.ProcessGroup) -> None:
    """Replaces the gradient by its sum over the ranks of the group, on the network of the device: a gradient whose home
    is elsewhere passes through the device part by part, so it takes no room there that the plan does not know."""
    is_there = gradient.device.type == device.type
    for part in gradient.split(len(gradient) if is_there else _PART_ELEMENTS):
        there = part if is_there else part.to(device)
        dist.all_reduce(there, group=group)
        if not is_there:
            part.copy_(there)


def _square(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient)) ** 2
