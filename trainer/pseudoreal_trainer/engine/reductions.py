"""The thread that ends gradients: waits for their sums, keeps them, agrees with the other ranks.

The grid's groups of the side thread are its own. It calls their collectives in the plan's order: so all ranks call them
in one order. It waits for other ranks, and never for an AdamW, except that it does not run further ahead of the updates
than the memory for kept gradients reaches. What it decides is the same on all ranks that have a part in a unit: how
much clipping leaves of the unit's gradient, and whether it is updated at all.
"""

import math
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from pseudoreal_api.spec.optimizer import Optimizer as OptimizerSpec
from torch import Tensor

from pseudoreal_trainer.engine.gradients import Gradients, Reduction
from pseudoreal_trainer.engine.ranks.grid import Grid
from pseudoreal_trainer.engine.ranks.lanes import Lane, Lanes, Mark, reach
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.side_work import SideWork
from pseudoreal_trainer.engine.state.memory import State
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.plan.steps import Agree, Reduce, Tie, Update
from pseudoreal_trainer.plan.units import Unit

_TINY = 1e-6
"""Added to the norm so that the clipping factor stays finite, as torch.nn.utils.clip_grad_norm_ does."""

_PART_ELEMENTS = 2**22
"""Elements of a gradient that pass through the device at a time: 16 MiB in float32."""

REMEDY = "lower spec.optimizer.learningRate or raise warmupSteps"


@dataclass(frozen=True)
class Agreement:
    """What all ranks have agreed on for a step."""

    loss_sum: float
    """Sum of the loss over all tokens of the batch, in nats."""
    norm: float
    """L2 norm of the whole gradient; 0 with clipping other than global."""
    stop: bool
    """Whether some rank was asked to stop."""
    finish: bool
    """Whether some rank was asked to end the phase."""
    left_out: tuple[int, ...] = ()
    """Units whose updates are left out, as something was not finite."""

    @property
    def trains(self) -> bool:
        return math.isfinite(self.loss_sum) and math.isfinite(self.norm)


class Reductions:
    def __init__(
        self,
        spec: OptimizerSpec,
        grid: Grid,
        units: tuple[Unit, ...],
        states: Mapping[int, State],
        gradients: Gradients,
        lanes: Lanes,
        trace: Trace,
    ) -> None:
        self._spec, self._grid, self._layout, self._units, self._states = spec, grid, grid.layout, units, states
        self._gradients, self._lanes, self._trace = gradients, lanes, trace
        self._heartbeat = grid.ranks.heartbeat.reductions
        self._thread = SideWork("reductions", grid.ranks.heartbeat.failure, lanes.enter_thread)
        self._skips = spec.non_finite == "Skip"
        # Of the step that is being reduced. Only the thread touches them.
        self._step = 0
        self._squares: dict[int, float] = {}
        self._agreement: Agreement | None = None
        self._left_out: set[int] = set()

    def begin(self, step: int) -> None:
        """Begins the training step `step`, counted from the job's start, which messages name."""
        self._thread.later(lambda: self._begin(step))

    def reduce(self, step: Reduce, reduction: Reduction, after: Future[Any] | None) -> None:
        """Ends the gradient of a unit in the side thread. `after`: the update that gives back the memory in which the
        gradient will be kept."""
        self._thread.later(lambda: self._finish(step, reduction, after))

    def tie(self, step: Tie) -> None:
        self._thread.later(lambda: self._tie(step))

    def agree(self, step: Agree, loss: Tensor | None, *, stop: bool, finish: bool) -> Future[Agreement]:
        """Starts the agreement on a step. `loss`: this rank's part of the batch's sum, a scalar; None where it has no
        head."""
        computed = self._lanes.mark()
        return self._thread.later(lambda: self._agree(step, loss, computed, (stop, finish)))

    def scale(self, step: Update) -> Future[float | None]:
        """The factor that clipping multiplies the unit's gradient by; None: its update is left out."""
        return self._thread.later(lambda: self._scale(step.unit))

    def end(self) -> Future[Agreement]:
        """Ends a step in which single units may be left out: the agreement, once all its gradients are summed."""
        return self._thread.later(self._ended)

    def close(self) -> None:
        self._thread.close()

    def _begin(self, step: int) -> None:
        self._step, self._agreement = step, None
        self._squares.clear()
        self._left_out.clear()

    def _finish(self, step: Reduce, reduction: Reduction, after: Future[Any] | None) -> None:
        state, at_home = self._states[step.unit], self._layout.home(step.unit) == "Device"
        try:
            with self._trace.span("reduce", step), self._lanes.on(Lane.UPDATE if at_home else Lane.COPY_OUT):
                self._await(step, reduction)
                if len(self._layout.users[step.unit]) == 1:
                    self._squares[step.unit] = _square(reduction.result)
                if after is not None:
                    after.result()
                state.keep_gradient(reduction.result)
                if not at_home:
                    self._trace.move("d2h", reduction.result.nbytes)
                # The buffer is free, and the host may read the gradient, only when the copy is made.
                reach(self._lanes.mark())
        finally:
            self._gradients.give_back(reduction)

    def _await(self, step: Reduce, reduction: Reduction) -> None:
        # This rank's own kernels are its work; from here on it waits for the other ranks.
        reach(reduction.grown)
        with self._heartbeat.waiting(f"reduces unit {step.unit}"):
            if reduction.work is not None:
                reduction.work.wait()
            self._lanes.follow(reduction.mark)
            # On a GPU only this waits.
            reach(self._lanes.mark())

    def _tie(self, step: Tie) -> None:
        users, state = self._layout.users[step.unit], self._states[step.unit]
        with self._trace.span("reduce", step), self._lanes.on(Lane.UPDATE):
            gradient = state.gradient()
            with self._heartbeat.waiting(f"sums unit {step.unit} over stages"):
                sum_by_parts(gradient, self._grid.device, self._grid.ties[users])
            self._trace.move("collective", gradient.nbytes * 2 * (len(users) - 1) // len(users))
            state.keep_gradient(gradient)
            self._squares[step.unit] = _square(gradient)

    def _agree(self, step: Agree, loss: Tensor | None, computed: Mark, asked: tuple[bool, bool]) -> Agreement:
        # This rank's own kernels are its work; from here on it waits for the other ranks.
        reach(computed)
        # On a lane: what is read on that of compute waits for all passes that are called already.
        with self._trace.span("agree", step), self._lanes.on(Lane.UPDATE):
            self._lanes.follow(computed)
            square = self._own_square() if self._layout.clipping == "Global" else 0.0
            values = [0.0 if loss is None else float(loss), square, *map(float, asked)]
            with self._heartbeat.waiting("agrees on the step"):
                loss_sum, norm, stop, finish = self._summed(values, self._grid.side_world)
            agreement = Agreement(loss_sum, math.sqrt(norm), stop=stop > 0, finish=finish > 0)
            nobody = () if agreement.trains else tuple(range(self._layout.units))
            self._agreement = replace(agreement, left_out=nobody)
            return self._agreement

    def _own_square(self) -> float:
        """This rank's part of the squared norm. A gradient that several ranks have is counted by the first of them."""
        counted = [
            square
            for unit, square in self._squares.items()
            if self._layout.users[unit][0] == self._grid.pipeline_rank
            and (self._layout.shards > 1 or self._grid.data_rank == 0)
        ]
        return sum(counted)

    def _scale(self, unit: int) -> float | None:
        agreement = self._agreement
        assert agreement is not None, "the plan agrees before it updates"
        if not agreement.trains:
            return None
        if self._layout.clipping == "Global":
            return self._factor(agreement.norm)
        square = self._whole_square(unit)
        # In the master type: the second moment of a larger gradient would not be finite.
        if not square <= torch.finfo(self._states[unit].extent.master).max:
            self._leave_out(unit)
            return None
        return self._factor(math.sqrt(square))

    def _factor(self, norm: float) -> float:
        bound = float(self._spec.clipping.norm)
        return 1.0 if self._layout.clipping == "None" else min(1.0, bound / (norm + _TINY))

    def _whole_square(self, unit: int) -> float:
        """Squared norm of the unit's gradient; where no other rank needs to know it, of this rank's part alone."""
        square = self._squares.pop(unit)
        if self._layout.shards == 1 or (self._layout.clipping == "None" and not self._skips):
            return square
        with self._lanes.on(Lane.UPDATE), self._heartbeat.waiting(f"sums the norm of unit {unit}"):
            return self._summed([square], self._grid.side_data)[0]

    def _leave_out(self, unit: int) -> None:
        if not self._skips:
            raise TrainingError(
                f"the gradient of {self._units[unit].name} is not finite in step {self._step}; {REMEDY}"
            )
        self._left_out.add(unit)

    def _ended(self) -> Agreement:
        agreement = self._agreement
        assert agreement is not None, "a step agrees"
        if not agreement.trains:
            return agreement
        mine = [float(self._is_counted_here(unit)) for unit in range(self._layout.units)]
        with self._lanes.on(Lane.UPDATE), self._heartbeat.waiting("agrees on what is left out"):
            counts = self._summed(mine, self._grid.side_world)
        return replace(agreement, left_out=tuple(unit for unit, count in enumerate(counts) if count))

    def _is_counted_here(self, unit: int) -> bool:
        return unit in self._left_out and self._layout.users[unit][0] == self._grid.pipeline_rank

    def _summed(self, values: list[float], group: dist.ProcessGroup | None) -> list[float]:
        """The sums of the values over the group. To be called on a lane beside compute: on that of compute it would
        wait for all passes that are called already."""
        if group is None:
            return values
        summed = torch.tensor(values, dtype=torch.float64).to(self._grid.device)
        dist.all_reduce(summed, group=group)
        sums: list[float] = summed.tolist()
        return sums


def sum_by_parts(gradient: Tensor, device: torch.device, group: dist.ProcessGroup) -> None:
    """Replaces the gradient by its sum over the ranks of the group, on the network of the device. A gradient whose home
    is elsewhere passes through the device part by part, so it takes no room there that the plan does not know."""
    is_there = gradient.device.type == device.type
    for part in gradient.split(len(gradient) if is_there else _PART_ELEMENTS):
        there = part if is_there else part.to(device)
        dist.all_reduce(there, group=group)
        if not is_there:
            part.copy_(there)


def _square(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient)) ** 2
