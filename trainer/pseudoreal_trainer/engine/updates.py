"""From the gradients of micro-batches to new weights: they grow, are summed over the ranks, clipped, and update a unit.

Three threads take part. The main thread adds up gradients and starts their sums, in the plan's order, which for those
of a unit is the same on all ranks that use it. The thread of reductions waits for the sums and agrees with the other
ranks. The thread of updates calls AdamW.

The thread of reductions has groups of its own (of the mesh `side_world`, `side_users` and the holders' `side_replica`).
It calls their collectives in the plan's order: so all ranks call them in one order. It waits for other
ranks, and never for an AdamW, except that it does not run further ahead of the updates than the memory for kept
gradients reaches. What it decides is the same on all ranks that have a part in a unit: how much clipping leaves of the
unit's gradient, and whether it is updated at all.
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from pseudoreal_api.spec.model import TopK
from pseudoreal_api.spec.optimizer import Optimizer as OptimizerSpec
from torch import Tensor

from pseudoreal_trainer.engine.balance import ExpertLoad, change_of_bias, choices_of
from pseudoreal_trainer.engine.growing_gradient import GrowingGradient
from pseudoreal_trainer.engine.norms import square_of
from pseudoreal_trainer.engine.ranks.lanes import Lane, Lanes, Mark, reach
from pseudoreal_trainer.engine.ranks.mesh import Mesh
from pseudoreal_trainer.engine.ranks.sums import sums_of
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.side_work import SideWork
from pseudoreal_trainer.engine.state.store import UnitStore
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.forecast.memory.crossing import KEPT_GRADIENTS
from pseudoreal_trainer.model.loss import Losses
from pseudoreal_trainer.model.modules import Modules
from pseudoreal_trainer.plan.records import Agree, Reduce, Update
from pseudoreal_trainer.plan.units import block_of
from pseudoreal_trainer.plan.update_ranges import elements_of

_TINY = 1e-6
"""Added to the norm so that the clipping factor stays finite, as torch.nn.utils.clip_grad_norm_ does."""

REMEDY = "lower spec.optimizer.learningRate or raise warmupSteps"


@dataclass(frozen=True)
class Reduction:
    """A sum of one unit's gradient over the ranks that use it, which is under way."""

    unit: int
    result: Tensor
    """This rank's part of the sum, [length], in the master type; to be read when `work` is done, after `mark`, and
    `neighbours` are summed over the replicas."""
    neighbours: Tensor | None
    """The parts of all replicas' ranks with this one's place, summed in this replica alone when `work` is done, after
    `mark`. None: there is one replica."""
    grown: Mark
    """The mark after which the passes of this rank have made the gradient: before the sum over the ranks begins."""
    work: dist.Work | None
    mark: Mark
    """The mark after which the gradient is summed."""
    buffer: Tensor | None
    """The buffer that the result lies in or was summed from, to be given back; None: it has memory of its own."""


class Gradients:
    """Gradients of the units of a rank while they grow, in the master type. Only the main thread calls this."""

    def __init__(self, store: UnitStore, modules: Modules, mesh: Mesh, lanes: Lanes, trace: Trace) -> None:
        self._store, self._modules, self._mesh, self._layout = store, modules, mesh, mesh.layout
        self._lanes, self._trace, self._heartbeat = lanes, trace, mesh.ranks.heartbeat
        self._growing: dict[int, GrowingGradient] = {}

    def accumulate(self, unit: int, gradients: Sequence[Tensor | None]) -> None:
        """Adds one pass's gradients of the unit's parameters; see `GrowingGradient.add`."""
        if unit not in self._growing:
            self._growing[unit] = self._begin(unit)
        self._growing[unit].add(gradients)

    def reduce(self, unit: int) -> Reduction:
        """Ends the gradient of a unit and starts its sum over the ranks that use it. All of them call this in the
        plan's order: the thread of reductions only waits for the sum."""
        growing = self._growing.pop(unit)
        flat, grown = growing.complete(), self._lanes.mark()
        with self._lanes.on(Lane.COLLECTIVE):
            self._lanes.follow(grown)
            result, neighbours, work = self._sum(unit, flat)
            return Reduction(unit, result, neighbours, grown, work, self._lanes.mark(), growing.buffer)

    def _begin(self, unit: int) -> GrowingGradient:
        if (whole := self._store.whole_gradients.get(unit)) is not None:
            return GrowingGradient(whole, self._modules.of(unit).views(whole))
        buffer = self._heartbeat.join(
            self._store.growth_buffers[self._layout.pool_of(unit)].take(), self._heartbeat.reductions
        )
        flat = buffer[: self._length(unit) * self._layout.shards(unit)]
        return GrowingGradient(flat, self._modules.of(unit).views(flat), buffer)

    def _length(self, unit: int) -> int:
        return self._store.states[unit].extent.length

    def _sum(self, unit: int, flat: Tensor) -> tuple[Tensor, Tensor | None, dist.Work | None]:
        """Starts the sum of `flat`, [padded numel], over its holders: this rank's part of it, the neighbours of that
        where replicas have yet to be summed, and the work to wait for."""
        holders, ranks = self._mesh.holders_of(unit), self._layout.holders(unit)
        if ranks == 1:
            return flat, None, None
        if self._layout.shards(unit) == 1:
            self._trace.move("collective", flat.nbytes * 2 * (ranks - 1) // ranks)
            return flat, None, dist.all_reduce(flat, group=holders.shard, async_op=True)
        # To where the gradient stays, if that is on the device; otherwise to a vector of its own.
        result = self._store.states[unit].gradient_memory()
        if result is None or result.device != flat.device:
            result = torch.empty(self._length(unit), dtype=flat.dtype, device=flat.device)
        # The neighbours are summed where they lie: nobody needs the rest of this rank's own gradient any more.
        neighbours = None if holders.replica is None else holders.neighbours(flat)
        summed = result if neighbours is None else neighbours
        if holders.shard is None:
            return result, neighbours, None
        self._trace.move("collective", flat.nbytes - summed.nbytes)
        return result, neighbours, dist.reduce_scatter_tensor(summed, flat, group=holders.shard, async_op=True)


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
    z_loss_sum: float | None = None
    """Sum of the z-loss over all tokens of the batch, in nats; None: it is not asked for."""
    left_out: tuple[int, ...] = ()
    """Units whose updates are left out, as something was not finite."""
    load: ExpertLoad | None = None
    """How tokens spread over experts; None without these."""

    @property
    def trains(self) -> bool:
        return math.isfinite(self.loss_sum) and math.isfinite(self.norm)


@dataclass(frozen=True)
class Terms:
    """How a unit is updated in a step."""

    factor: float
    """What clipping multiplies its gradient by."""
    idle: tuple[range, ...] = ()
    """Elements of its flat vector that stay as they are: those of experts to which no token went."""


class Reductions:
    """The thread that ends gradients: it waits for their sums, keeps them, and agrees with the other ranks."""

    def __init__(
        self,
        spec: OptimizerSpec,
        store: UnitStore,
        mesh: Mesh,
        lanes: Lanes,
        trace: Trace,
        top_k: TopK | None = None,
    ) -> None:
        self._spec, self._store, self._mesh, self._layout = spec, store, mesh, mesh.layout
        self._bias_update_rate = float(top_k.bias_update_rate or 0) if top_k else 0.0
        self._lanes, self._trace, self._heartbeat = lanes, trace, mesh.ranks.heartbeat.reductions
        self._thread = SideWork("reductions", mesh.ranks.heartbeat.failure, lanes.enter_thread)
        self._skips_idle = spec.idle_experts == "Skip"
        self._skips, self._has_z_loss = spec.non_finite == "Skip", float(spec.z_loss) > 0
        # What follows belongs to the step that is being reduced. Only the thread touches it.
        self._step = 0
        self._squares: dict[int, float] = {}
        self._agreement: Agreement | None = None
        self._left_out: set[int] = set()
        self._choices: list[list[float]] = []
        """How many tokens of the step chose each expert, layer after layer with experts; with global clipping."""

    # The main thread calls these in the plan's order. Each gives the thread a task.

    def begin(self, step: int) -> None:
        """Begins the training step `step`, counted from the job's start, which messages name."""
        self._thread.later(lambda: self._begin(step))

    def reduce(self, record: Reduce, reduction: Reduction, after: Future[Any] | None) -> None:
        """Waits for the sum of a unit's gradient and keeps it. `after`: the update that gives back the memory in which
        the gradient will be kept."""
        self._thread.later(lambda: self._finish(record, reduction, after))

    def agree(
        self, record: Agree, losses: Losses | None, loads: Tensor, *, stop: bool, finish: bool
    ) -> Future[Agreement]:
        """Starts the agreement on a step. `losses`: this rank's part of the batch's sums; None where it has no head.
        `loads`: as in `end`, and empty where the step ends with that."""
        computed = self._lanes.mark()
        return self._thread.later(lambda: self._agree(record, losses, loads, computed, (stop, finish)))

    def terms(self, record: Update) -> Future[Terms | None]:
        """How the unit is updated; None: its update is left out."""
        return self._thread.later(lambda: self._terms(record.unit))

    def end(self, loads: Tensor) -> Future[Agreement]:
        """Ends a step in which single units may be left out, or tokens are counted: the agreement, once all its
        gradients are summed. `loads`: this rank's sums, [layers with experts, experts + Tally.OTHERS]; no layer has
        them where there are no experts."""
        computed = self._lanes.mark()
        return self._thread.later(lambda: self._ended(loads, computed))

    def close(self) -> None:
        self._thread.close()

    def _begin(self, step: int) -> None:
        self._step, self._agreement = step, None
        self._squares.clear()
        self._left_out.clear()

    def _finish(self, record: Reduce, reduction: Reduction, after: Future[Any] | None) -> None:
        state, at_home = self._store.states[record.unit], self._layout.home(record.unit) == "Device"
        try:
            with self._trace.span("reduce", record), self._lanes.on(Lane.UPDATE if at_home else Lane.COPY_OUT):
                self._await(record, reduction)
                self._take_in(record.unit, reduction.result)
                if after is not None:
                    after.result()
                state.keep_gradient(reduction.result)
                if not at_home:
                    self._trace.move("d2h", reduction.result.nbytes)
                # The buffer is free, and the host may read the gradient, only when the copy is made.
                reach(self._lanes.mark())
        finally:
            # After a failure, too: the main thread may be waiting for a buffer.
            if reduction.buffer is not None:
                self._store.growth_buffers[self._layout.pool_of(record.unit)].give_back(reduction.buffer)

    def _await(self, record: Reduce, reduction: Reduction) -> None:
        # This rank's own kernels are its work; from here on it waits for the other ranks.
        reach(reduction.grown)
        with self._heartbeat.waiting(f"reduces unit {record.unit}"):
            if reduction.work is not None:
                reduction.work.wait()
            self._lanes.follow(reduction.mark)
            if reduction.neighbours is not None:
                self._sum_over_replicas(reduction.unit, reduction.result, reduction.neighbours)
            # On a GPU only this waits.
            reach(self._lanes.mark())

    def _sum_over_replicas(self, unit: int, result: Tensor, neighbours: Tensor) -> None:
        dist.reduce_scatter_tensor(result, neighbours, group=self._mesh.holders_of(unit).side_replica)
        self._trace.move("replicas", neighbours.nbytes - result.nbytes)

    def _take_in(self, unit: int, gradient: Tensor) -> None:
        """Notes the square of this rank's part of a gradient that is summed over all ranks, [length]. In place of the
        tokens of experts it gets the change of their balancing bias, which is no part of the norm."""
        balancing = self._store.states[unit].extent.balancing
        self._squares[unit] = square_of(gradient[: balancing.start])
        if len(bias := gradient[balancing]):
            bias.copy_(change_of_bias(bias, self._bias_update_rate))

    def _agree(
        self, record: Agree, losses: Losses | None, loads: Tensor, computed: Mark, asked: tuple[bool, bool]
    ) -> Agreement:
        # This rank's own kernels are its work; from here on it waits for the other ranks.
        reach(computed)
        # On a lane: what is read on that of compute waits for all passes that are called already.
        with self._trace.span("agree", record), self._lanes.on(Lane.UPDATE):
            self._lanes.follow(computed)
            square = self._own_square() if self._layout.clipping == "Global" else 0.0
            values = [0.0 if losses is None else float(losses.cross_entropy), square, *map(float, asked)]
            if self._has_z_loss:
                values.append(0.0 if losses is None or losses.z is None else float(losses.z))
            with self._heartbeat.waiting("agrees on the step"):
                lists = values, loads.flatten().tolist()
                sums, tokens = sums_of(lists, self._mesh.device, self._mesh.side_world)
            loss_sum, norm, stop, finish, *z_loss_sum = sums
            z = z_loss_sum[0] if self._has_z_loss else None
            agreement = Agreement(loss_sum, math.sqrt(norm), stop=stop > 0, finish=finish > 0, z_loss_sum=z)
            nobody = () if agreement.trains else tuple(range(self._layout.units))
            self._choices = choices_of(tokens, len(loads))
            load = ExpertLoad.of(tokens, layers=len(loads)) if agreement.trains else None
            self._agreement = replace(agreement, left_out=nobody, load=load)
            return self._agreement

    def _own_square(self) -> float:
        """This rank's part of the squared norm."""
        return sum(self._counted(unit, square) for unit, square in self._squares.items())

    def _counted(self, unit: int, square: float) -> float:
        """A square as this rank counts it: where all holders have the whole of a gradient, the first one does."""
        return square if self._layout.shards(unit) > 1 or self._mesh.part(unit) == 0 else 0.0

    def _terms(self, unit: int) -> Terms | None:
        factor = self._scale(unit)
        return None if factor is None else Terms(factor, self._idle(unit) if self._skips_idle else ())

    def _idle(self, unit: int) -> tuple[range, ...]:
        """The elements of experts that no token of the step chose, in any of the layers that share them."""
        described, shards = self._store.units[unit], self._layout.shards(unit)
        if described.experts is None:
            return ()
        sets = [number for number in self._layout.layer_experts if number is not None]
        of_layers = zip(sets, self._choices, strict=True)
        counts = [counts for number, counts in of_layers if number == block_of(described.name)]
        idle = [expert for expert in described.experts if not any(count[expert] for count in counts)]
        return elements_of(described, {*idle}, self._store.states[unit].extent.length * shards)

    def _scale(self, unit: int) -> float | None:
        agreement = self._agreement
        assert agreement is not None, "the plan agrees before it updates"
        if not agreement.trains:
            return None
        if self._layout.clipping == "Global":
            return self._factor(agreement.norm)
        square = self._whole_square(unit)
        # In the master type: the second moment of a larger gradient would not be finite.
        if not square <= torch.finfo(self._store.states[unit].extent.master).max:
            self._leave_out(unit)
            return None
        return self._factor(math.sqrt(square))

    def _factor(self, norm: float) -> float:
        bound = float(self._spec.clipping.norm)
        return 1.0 if self._layout.clipping == "None" else min(1.0, bound / (norm + _TINY))

    def _whole_square(self, unit: int) -> float:
        """Squared norm of the unit's gradient; where no other rank needs to know it, of this rank's part alone."""
        square = self._squares.pop(unit)
        if self._layout.holds_whole(unit) or (self._layout.clipping == "None" and not self._skips):
            return square
        with self._lanes.on(Lane.UPDATE), self._heartbeat.waiting(f"sums the norm of unit {unit}"):
            counted = self._counted(unit, square)
            ((whole,),) = sums_of([[counted]], self._mesh.device, self._mesh.side_users_of(unit))
            return whole

    def _leave_out(self, unit: int) -> None:
        if not self._skips:
            name = self._store.units[unit].name
            raise TrainingError(f"the gradient of {name} is not finite in step {self._step}; {REMEDY}")
        self._left_out.add(unit)

    def _ended(self, loads: Tensor, computed: Mark) -> Agreement:
        agreement = self._agreement
        assert agreement is not None, "a step agrees"
        if not agreement.trains:
            return agreement
        mine = [float(unit in self._left_out) for unit in range(self._layout.units)]
        reach(computed)
        with self._lanes.on(Lane.UPDATE), self._heartbeat.waiting("agrees on what the step left out and counted"):
            lists = mine, loads.flatten().tolist()
            counts, tokens = sums_of(lists, self._mesh.device, self._mesh.side_world)
        left_out = tuple(unit for unit, count in enumerate(counts) if count)
        return replace(agreement, left_out=left_out, load=ExpertLoad.of(tokens, layers=len(loads)))


class Updates:
    """The thread that updates units, one after the other, while the main thread computes and another one reduces."""

    def __init__(
        self, spec: OptimizerSpec, store: UnitStore, reductions: Reductions, mesh: Mesh, lanes: Lanes, trace: Trace
    ) -> None:
        self._spec, self._store, self._reductions = spec, store, reductions
        self._lanes, self._trace, self._heartbeat = lanes, trace, mesh.ranks.heartbeat
        self._thread = SideWork("updates", self._heartbeat.failure, lanes.enter_thread)
        self._newest: deque[Future[Mark]] = deque(maxlen=KEPT_GRADIENTS)
        self.holds: dict[int, Future[None]] = {}
        """Unit -> capture that its next update waits for."""
        self.held_seconds = 0.0
        """Seconds that updates have waited for captures."""

    @property
    def before_next_gradient(self) -> Future[Mark] | None:
        """The update that must be done before the next gradient is kept. None: there is memory for it."""
        return self._newest[0] if len(self._newest) == KEPT_GRADIENTS else None

    def update(self, record: Update, rate: float) -> Future[Mark]:
        """Updates a unit in the thread, with this learning rate. The result is the mark after which it has new
        weights."""
        hold, terms = self.holds.pop(record.unit, None), self._reductions.terms(record)
        updated = self._thread.later(lambda: self._update(record, rate, terms, hold))
        self._newest.append(updated)
        return updated

    def close(self) -> None:
        self._thread.close()

    def _update(self, record: Update, rate: float, terms: Future[Terms | None], hold: Future[None] | None) -> Mark:
        with self._heartbeat.updates.waiting_behind(self._heartbeat.reductions):
            agreed = terms.result()
        if agreed is None:
            self._store.states[record.unit].drop_gradient()
            return None
        if hold is not None:
            self._wait_for(hold, record)
        with self._trace.span("update", record), self._lanes.on(Lane.UPDATE):
            self._store.states[record.unit].update(self._spec, rate, agreed.factor, agreed.idle)
            return self._lanes.mark()

    def _wait_for(self, hold: Future[None], record: Update) -> None:
        begin = time.perf_counter()
        with self._trace.span("checkpoint", record, "hold"):
            hold.result()
        self.held_seconds += time.perf_counter() - begin
