"""Gradients of a step: accumulate, reduce, agree, clip, update.

Three threads; the reduction and update threads have a FIFO queue each. Time runs down.

main thread (`Gradients`)    reduction thread (`ReductionThread`)   update thread (`UpdateThread`)
-------------------------    -------------------------------------  ---------------------------------
Backward(u, m), every m
  add to u's gradient
Reduce(u)
  launch the sum within
  the replica ------------>  wait for it; sum across replicas
                             round this rank's part, record |g|^2
                             wait for `after` <-------------------  an older update frees its memory
                             copy g to u's home, free the buffer
(Speculate(u)) ---------------------------------------------------> wait for Reduce(u), copy u, AdamW(u)
Agree -------------------->  all-reduce loss, flags, |g|^2
Update(u) ---------------->  clip factor of u, or skip u -------->  wait for a capture of u
next Fetch(u) <---------------------------------------------------  AdamW(u), or drop g; record event
end of the step <----------  all-reduce skipped units, expert load

With global clipping the plan is Reduce(u) for all u, Agree, Update(u) for all u: no update before the norm is known.
If updates are speculative, Speculate(u) updates u before the norm is known, as if nothing were clipped; Update(u)
keeps the result, or restores u and updates it again. Speculate(u) does nothing if u is being captured, or once the
ranks have agreed: Updates follow in the order in which the next step needs the units, and Speculates in another one.
Otherwise Agree comes early with loss and flags only, and Update(u) follows Reduce(u); the clip factor of u may then
take an all-reduce of |g|^2 over the ranks that use u. The last row is needed only after an early Agree, if updates may
be skipped or the model has experts; in all other plans, the step ends with the result of Agree.

Arrows to the right are tasks: `await_reduction`, `request_agreement`, `request_terms` and `request_final_agreement` of
`ReductionThread`, `update` of `UpdateThread`. Arrows to the left are futures, and so are the terms of an update.

Order: every rank enqueues in plan order, which for a unit is the same on all ranks that use it. The reduction thread
has groups of its own (`reduce_world` and `reduce_users` of `ProcessGroups`, `inter_reduce` of `UnitGroups`), so all
ranks launch its collectives in one order.

Progress: the reduction thread waits for AdamW only through `after`, once all memory for kept gradients is in use. It
delivered the terms of that update earlier, because its queue is FIFO. Speculate(u) waits for Reduce(u) alone, whose
`after` is an update of the step before, earlier in the queue of the update thread.

Agreement: the clip factor of a unit, and whether it is skipped, are the same on all ranks that hold a part of it.
"""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from pseudoreal_api.spec.model import TopK
from pseudoreal_api.spec.optimizer import Optimizer as OptimizerSpec
from torch import Tensor

from pseudoreal_trainer.engine.norms import square_of
from pseudoreal_trainer.engine.ranks.process_groups import ProcessGroups
from pseudoreal_trainer.engine.ranks.streams import Event, Stream, Streams, synchronize
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.router_statistics import ExpertLoad, change_of_bias, choices_of
from pseudoreal_trainer.engine.state.blocks import largest_number
from pseudoreal_trainer.engine.state.store import UnitStore
from pseudoreal_trainer.engine.worker_thread import WorkerThread
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.model.loss import Losses
from pseudoreal_trainer.model.modules import Modules
from pseudoreal_trainer.plan.memory.pinned_arena import PENDING_GRADIENTS
from pseudoreal_trainer.plan.records import Agree, Reduce, Speculate, Update
from pseudoreal_trainer.plan.units import block_of
from pseudoreal_trainer.plan.update_ranges import elements_of

_TINY = 1e-6
"""Added to the norm so that the clip factor stays finite, as in torch.nn.utils.clip_grad_norm_."""

REMEDY = "lower spec.optimizer.learningRate or raise warmupSteps"


@dataclass
class GradientAccumulator:
    """Accumulates the gradients of a unit over passes: one pass per micro-batch, or per chunk of the loss."""

    flat: Tensor
    """Memory of the gradient, [padded numel], in the master dtype. The first gradient added for a parameter overwrites
    the content."""
    views: list[Tensor]
    """Views of `flat`, one per parameter, with its shape."""
    buffer: Tensor | None = None
    """Buffer that contains `flat`, given back after the reduction; None: the accumulator has its own memory."""
    _started: set[int] = field(default_factory=set)
    """Indices of the parameters for which a gradient was added."""

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one pass: one per parameter, in order and with its shape, in the compute dtype. None:
        the pass does not use the parameter."""
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if index in self._started:
                self.views[index].add_(gradient)
            else:
                self.views[index].copy_(gradient)
                self._started.add(index)

    def complete(self) -> Tensor:
        """Return the whole gradient, [padded numel]: zero for parameters that no pass used, and in the padding."""
        for index, view in enumerate(self.views):
            if index not in self._started:
                view.zero_()
        self.flat[sum(view.numel() for view in self.views) :].zero_()
        return self.flat


@dataclass(frozen=True)
class PendingReduction:
    """Sum of one unit's gradient over the ranks that use the unit, in flight."""

    unit: int
    result: Tensor
    """This rank's part of the sum, [length], in the master dtype. Valid after `accumulated`, once `work` is done, and
    once `inter_slice` is summed across replicas."""
    inter_slice: Tensor | None
    """Inter-replica slice of the gradient, [replicas * length]: the parts of all ranks with this rank's index in their
    replicas. Once `work` is done, it is summed within this replica only. None: there is one replica."""
    accumulated: Event
    """Event after which this rank's own gradient is complete, before the sum over ranks starts."""
    work: dist.Work | None
    """Sum within this replica, which starts after `accumulated`. None: this rank is alone in its replica."""
    buffer: Tensor | None
    """Buffer that contains the result or its summands, to be given back afterwards; None: the gradient has its own
    memory."""
    replicated: Event = None
    """Event after which the gradients of replicated tensors are summed over the tensor ranks; None: the unit has
    none."""


class Gradients:
    """Gradient accumulators of the units of a rank, in the master dtype. Main thread only."""

    def __init__(
        self, store: UnitStore, modules: Modules, groups: ProcessGroups, streams: Streams, trace: Trace
    ) -> None:
        self._store, self._modules, self._groups, self._layout = store, modules, groups, groups.layout
        self._streams, self._trace, self._heartbeat = streams, trace, groups.ranks.heartbeat
        self._accumulators: dict[int, GradientAccumulator] = {}

    def accumulate(self, unit: int, gradients: Sequence[Tensor | None]) -> None:
        """Add one pass's gradients of the unit's parameters; see `GradientAccumulator.add`."""
        if unit not in self._accumulators:
            self._accumulators[unit] = self._new_accumulator(unit)
        self._accumulators[unit].add(gradients)

    def launch_reduction(self, unit: int) -> PendingReduction:
        """Complete the gradient of a unit and launch its sum over the ranks that use the unit.

        All of these ranks call this in plan order; the reduction thread only waits for the sum.
        """
        accumulator = self._accumulators.pop(unit)
        flat, accumulated = accumulator.complete(), self._streams.record_event()
        with self._streams.on(Stream.COLLECTIVE):
            self._streams.wait_event(accumulated)
            summed = None
            if replicated := self._store.units[unit].replicated:
                self._sum_replicated(flat, replicated)
                summed = self._streams.record_event()
            result, inter_slice, work = self._launch_sum(unit, flat)
            return PendingReduction(unit, result, inter_slice, accumulated, work, accumulator.buffer, summed)

    def _sum_replicated(self, flat: Tensor, replicated: Sequence[range]) -> None:
        """Sum the gradients of replicated tensors over the tensor ranks, in place: each rank has the gradients of its
        own tokens or heads."""
        ranks = self._layout.tensor_ranks
        for elements in replicated:
            part = flat[elements.start : elements.stop]
            self._trace.count_bytes("tensor", 2 * (ranks - 1) * part.nbytes // ranks)
            with self._heartbeat.waiting("sums gradients over tensor ranks"):
                dist.all_reduce(part, group=self._groups.tensor)

    def _new_accumulator(self, unit: int) -> GradientAccumulator:
        if (whole := self._store.whole_gradients.get(unit)) is not None:
            return GradientAccumulator(whole, self._modules.of(unit).views(whole))
        buffer = self._heartbeat.join(self._store.gradient_buffers[unit].take(), self._heartbeat.reductions)
        flat = buffer[: self._length(unit) * self._layout.shards(unit)]
        return GradientAccumulator(flat, self._modules.of(unit).views(flat), buffer)

    def _length(self, unit: int) -> int:
        return self._store.states[unit].shard.length

    def _launch_sum(self, unit: int, flat: Tensor) -> tuple[Tensor, Tensor | None, dist.Work | None]:
        """Launch the sum of `flat`, [padded numel], over the ranks that hold the unit. Return this rank's part, the
        inter-replica slice if replicas have yet to be summed, and the work to wait for."""
        groups, ranks = self._groups.unit_groups(unit), self._layout.holders(unit)
        if ranks == 1:
            return flat, None, None
        if self._layout.shards(unit) == 1:
            self._trace.count_bytes("collective", flat.nbytes * 2 * (ranks - 1) // ranks)
            return flat, None, dist.all_reduce(flat, group=groups.intra, async_op=True)
        # Sum directly into the memory in which the gradient stays, if this memory is on the device and in the master
        # dtype; otherwise into a new vector.
        result = self._store.states[unit].gradient_memory()
        if result is None or result.device != flat.device or result.dtype != flat.dtype:
            result = torch.empty(self._length(unit), dtype=flat.dtype, device=flat.device)
        # In place: the rest of this rank's own gradient is not needed any more.
        inter_slice = None if groups.inter is None else groups.inter_slice(flat)
        summed = result if inter_slice is None else inter_slice
        if groups.intra is None:
            return result, inter_slice, None
        self._trace.count_bytes("collective", flat.nbytes - summed.nbytes)
        return result, inter_slice, dist.reduce_scatter_tensor(summed, flat, group=groups.intra, async_op=True)


@dataclass(frozen=True)
class Agreement:
    """Values of a step on which all ranks agree."""

    loss_sum: float
    """Loss summed over all tokens of the batch, in nats."""
    norm: float
    """L2 norm of the whole gradient; 0 unless clipping is global."""
    stop: bool
    """Whether a stop was requested on any rank."""
    finish: bool
    """Whether the end of the phase was requested on any rank."""
    z_loss_sum: float | None = None
    """z-loss summed over all tokens of the batch, in nats; None without z-loss."""
    skipped: tuple[int, ...] = ()
    """Units whose updates are skipped, because a value was not finite."""
    load: ExpertLoad | None = None
    """Distribution of tokens over experts; None without experts, and if the loss or the norm is not finite."""

    @property
    def trains(self) -> bool:
        """Whether loss and norm are finite; if not, the step updates nothing."""
        return math.isfinite(self.loss_sum) and math.isfinite(self.norm)


@dataclass(frozen=True)
class UpdateTerms:
    """Terms of a unit's update, the same on all ranks that hold a part of the unit."""

    factor: float
    """Clip factor of the gradient, at most 1."""
    idle: tuple[range, ...] = ()
    """Ranges of the unit's flat vector that stay unchanged: experts that no token chose."""


@dataclass
class OpenStep:
    """A step that is being reduced. The reduction thread changes the object; the update thread reads it after a
    reduction of the step. Ranks may read different values: only the time of an update depends on them."""

    may_speculate: bool
    """Whether updates may start: the ranks have not agreed on this step, and did not clip the step before. Steps that
    are clipped come in runs, at the start of a training above all."""


class ReductionThread:
    """The reduction thread: waits for sums of gradients, keeps the results, and agrees with the other ranks."""

    def __init__(
        self,
        spec: OptimizerSpec,
        store: UnitStore,
        groups: ProcessGroups,
        streams: Streams,
        trace: Trace,
        top_k: TopK | None = None,
    ) -> None:
        self._spec, self._store, self._groups, self._layout = spec, store, groups, groups.layout
        self._bias_update_rate = float(top_k.bias_update_rate or 0) if top_k else 0.0
        self._streams, self._trace, self._heartbeat = streams, trace, groups.ranks.heartbeat.reductions
        self._thread = WorkerThread("reductions", groups.ranks.heartbeat.failure, streams.enter_thread)
        self._skips_idle = spec.idle_experts == "Skip"
        self._skips, self._has_z_loss = spec.non_finite == "Skip", float(spec.z_loss) > 0
        # State of the step that is being reduced; only the reduction thread touches it.
        self._step = 0
        self._squares: dict[int, float] = {}
        self._agreement: Agreement | None = None
        self.step = OpenStep(may_speculate=False)
        """The newest step that the main thread has begun. Main thread only; the object is shared with other
        threads."""
        self._open = self.step
        """The step that is being reduced."""
        self._waits_for_norm = True
        """Whether the updates of the next step wait for its norm: the newest agreement clipped the gradient or stopped
        the updates, or there was none yet."""
        self._skipped: set[int] = set()
        self._choices: list[list[float]] = []
        """[layers with experts][experts]: number of the step's tokens that chose the expert. Counted by `Agree` with
        global clipping; empty otherwise."""

    # Called by the main thread in plan order. Each enqueues a task for the reduction thread.

    def begin_step(self, step: int) -> None:
        """Start training step `step`, counted from the job's start; error messages name it."""
        self.step = opened = OpenStep(may_speculate=False)
        self._thread.submit(lambda: self._begin_step(step, opened))

    def await_reduction(self, record: Reduce, pending: PendingReduction, after: Future[Any] | None) -> Future[None]:
        """Enqueue a task that waits for the sum of a unit's gradient and keeps the result. The future completes once
        the gradient is in the unit's home. `after`: update that frees the memory for the gradient; None: memory is
        free."""
        return self._thread.submit(lambda: self._finish_reduction(record, pending, after))

    def request_agreement(
        self, record: Agree, losses: Losses | None, statistics: Tensor, *, stop: bool, finish: bool
    ) -> Future[Agreement]:
        """Enqueue the agreement on a step. `losses`: this rank's part of the batch's loss sums; None without the head.
        `statistics`: router statistics as in `request_final_agreement`; empty if that call follows."""
        computed = self._streams.record_event()
        return self._thread.submit(lambda: self._agree(record, losses, statistics, computed, (stop, finish)))

    def request_terms(self, record: Update) -> Future[UpdateTerms | None]:
        """Enqueue the computation of the terms of the unit's update; the future yields None if the update is
        skipped."""
        return self._thread.submit(lambda: self._update_terms(record.unit))

    def request_final_agreement(self, statistics: Tensor) -> Future[Agreement]:
        """Enqueue the agreement on skipped units and expert load, after the sums of all gradients. Call this in steps
        that may skip single units or that count the tokens of experts. `statistics`: router statistics of this rank,
        [layers with experts, experts + RouterStatistics.OTHERS]; empty without experts."""
        computed = self._streams.record_event()
        return self._thread.submit(lambda: self._agree_finally(statistics, computed))

    def close(self) -> None:
        self._thread.close()

    def _begin_step(self, step: int, opened: OpenStep) -> None:
        self._step, self._agreement, self._open = step, None, opened
        opened.may_speculate = not self._waits_for_norm
        self._squares.clear()
        self._skipped.clear()

    def _finish_reduction(self, record: Reduce, pending: PendingReduction, after: Future[Any] | None) -> None:
        state, on_device = self._store.states[record.unit], self._layout.home(record.unit) == "Device"
        try:
            with self._trace.span("reduce", record):
                with self._streams.on(Stream.REDUCTION):
                    self._finish_sum(record, pending)
                    self._record_square(record.unit, pending.result)
                    gradient = self._in_dtype_of_home(record.unit, pending.result)
                    reduced = self._streams.record_event()
                # Wait for AdamW after the collectives of this sum: a wait before the collectives would make other ranks
                # wait, too.
                if after is not None:
                    after.result()
                with self._streams.on(Stream.UPDATE if on_device else Stream.COPY_OUT):
                    self._streams.wait_event(reduced)
                    state.keep_gradient(gradient)
                    if not on_device:
                        self._trace.count_bytes("d2h", gradient.nbytes)
                    # The copy is asynchronous: wait before the host reads the gradient and before the buffer is reused.
                    synchronize(self._streams.record_event())
        finally:
            # Give the buffer back even after a failure: the main thread may be waiting for a buffer.
            if pending.buffer is not None:
                self._store.gradient_buffers[record.unit].give_back(pending.buffer)

    def _finish_sum(self, record: Reduce, pending: PendingReduction) -> None:
        # Orders everything below after the gradient, even if there is no work to wait for. Not inside `waiting`: time
        # for this rank's own kernels must not look like waiting for other ranks.
        synchronize(pending.accumulated)
        with self._heartbeat.waiting(f"reduces unit {record.unit}"):
            if pending.replicated is not None:
                self._streams.wait_event(pending.replicated)
            if pending.work is not None:
                pending.work.wait()
            if pending.inter_slice is not None:
                self._sum_over_replicas(pending.unit, pending.result, pending.inter_slice)
            # On a GPU the calls above only order the stream; this call blocks the thread.
            synchronize(self._streams.record_event())

    def _sum_over_replicas(self, unit: int, result: Tensor, inter_slice: Tensor) -> None:
        dist.reduce_scatter_tensor(result, inter_slice, group=self._groups.unit_groups(unit).inter_reduce)
        self._trace.count_bytes("replicas", inter_slice.nbytes - result.nbytes)

    def _record_square(self, unit: int, gradient: Tensor) -> None:
        """Round this rank's part of a gradient that is summed over all ranks, [length], and record its square.

        Replace the token counts in the range of the balancing bias by the change of the bias, which is excluded from
        the norm.
        """
        balancing = self._store.states[unit].shard.balancing
        if len(bias := gradient[balancing]):
            bias.copy_(change_of_bias(bias, self._bias_update_rate))
        if self._store.gradient_rounding is not None:
            self._store.gradient_rounding.round(gradient)
        in_norm = self._elements_in_norm(unit, balancing.start)
        self._squares[unit] = sum(square_of(gradient[part.start : part.stop]) for part in in_norm)

    def _elements_in_norm(self, unit: int, end: int) -> list[range]:
        """Return the elements before `end` of this rank's part of a gradient, without elements that another rank counts
        in the norm: the first tensor rank counts the replicated tensors."""
        begin = self._store.states[unit].shard.begin
        left_out = self._store.units[unit].replicated if self._groups.tensor_rank else ()
        cuts = [0, *(min(max(at - begin, 0), end) for part in left_out for at in (part.start, part.stop)), end]
        return [range(first, last) for first, last in zip(cuts[::2], cuts[1::2], strict=True) if first < last]

    def _in_dtype_of_home(self, unit: int, gradient: Tensor) -> Tensor:
        """Return the gradient, [length], in the dtype in which the home keeps it."""
        if self._store.states[unit].shard.gradient == gradient.dtype:
            return gradient
        assert self._store.gradient_rounding is not None, "homes keep gradients as they are rounded"
        return self._store.gradient_rounding.pack(gradient)

    def _agree(
        self, record: Agree, losses: Losses | None, statistics: Tensor, computed: Event, requested: tuple[bool, bool]
    ) -> Agreement:
        # Orders the reads below after the losses. Not inside `waiting`: time for this rank's own kernels must not look
        # like waiting for other ranks.
        synchronize(computed)
        # On a side stream: reading a value on the compute stream would wait for all passes launched so far.
        with self._trace.span("agree", record), self._streams.on(Stream.REDUCTION):
            square = self._own_square() if self._layout.clipping == "Global" else 0.0
            values = [0.0 if losses is None else float(losses.cross_entropy), square, *map(float, requested)]
            if self._has_z_loss:
                values.append(0.0 if losses is None or losses.z is None else float(losses.z))
            with self._heartbeat.waiting("agrees on the step"):
                lists = values, statistics.flatten().tolist()
                sums, tokens = sums_of(lists, self._groups.device, self._groups.reduce_world)
            loss_sum, norm, stop, finish, *z_loss_sum = sums
            z = z_loss_sum[0] if self._has_z_loss else None
            agreement = Agreement(loss_sum, math.sqrt(norm), stop=stop > 0, finish=finish > 0, z_loss_sum=z)
            skipped = () if agreement.trains else tuple(range(self._layout.units))
            self._choices = choices_of(tokens, len(statistics))
            load = ExpertLoad.of(tokens, layers=len(statistics)) if agreement.trains else None
            self._waits_for_norm = not agreement.trains or self._factor_for(agreement.norm) < 1
            self._open.may_speculate = False
            self._agreement = replace(agreement, skipped=skipped, load=load)
            return self._agreement

    def _own_square(self) -> float:
        """Return this rank's part of the squared norm."""
        return sum(self._square_to_count(unit, square) for unit, square in self._squares.items())

    def _square_to_count(self, unit: int, square: float) -> float:
        """Return this rank's summand of the squared norm. If all holders have the whole gradient, only the first holder
        counts the square."""
        return square if self._layout.shards(unit) > 1 or self._groups.part(unit) == 0 else 0.0

    def _update_terms(self, unit: int) -> UpdateTerms | None:
        factor = self._clip_factor(unit)
        return None if factor is None else UpdateTerms(factor, self._idle(unit) if self._skips_idle else ())

    def _idle(self, unit: int) -> tuple[range, ...]:
        """Return the ranges of experts that no token of the step chose, in any of the layers that share them."""
        described, shards = self._store.units[unit], self._layout.shards(unit)
        if described.experts is None:
            return ()
        sets = [number for number in self._layout.layer_experts if number is not None]
        of_layers = zip(sets, self._choices, strict=True)
        counts = [counts for number, counts in of_layers if number == block_of(described.name)]
        idle = [expert for expert in described.experts if not any(count[expert] for count in counts)]
        return elements_of(described, {*idle}, self._store.states[unit].shard.length * shards)

    def _clip_factor(self, unit: int) -> float | None:
        agreement = self._agreement
        assert agreement is not None, "every plan contains Agree before the first Update"
        if not agreement.trains:
            return None
        if self._layout.clipping == "Global":
            return self._factor_for(agreement.norm)
        square = self._square_of_unit(unit)
        # Largest value of the dtypes of the state: the second moment of a larger gradient would not be finite.
        shard = self._store.states[unit].shard
        if not square <= min(largest_number(dtype) for dtype in (shard.master, shard.moments)):
            self._skip_or_fail(unit)
            return None
        return self._factor_for(math.sqrt(square))

    def _factor_for(self, norm: float) -> float:
        bound = float(self._spec.clipping.norm)
        return 1.0 if self._layout.clipping == "None" else min(1.0, bound / (norm + _TINY))

    def _square_of_unit(self, unit: int) -> float:
        """Return the squared norm of the unit's whole gradient. Without clipping and skipping, the square of this
        rank's part only."""
        square = self._squares.pop(unit)
        # Layout and settings are the same on all ranks that use the unit, so all of them or none reach the collective.
        if self._layout.holds_whole(unit) or (self._layout.clipping == "None" and not self._skips):
            return square
        with self._streams.on(Stream.REDUCTION), self._heartbeat.waiting(f"sums the norm of unit {unit}"):
            counted = self._square_to_count(unit, square)
            ((whole,),) = sums_of([[counted]], self._groups.device, self._groups.reduce_users_of(unit))
            return whole

    def _skip_or_fail(self, unit: int) -> None:
        if not self._skips:
            name = self._store.units[unit].name
            raise TrainingError(f"the gradient of {name} is not finite in step {self._step}; {REMEDY}")
        self._skipped.add(unit)

    def _agree_finally(self, statistics: Tensor, computed: Event) -> Agreement:
        agreement = self._agreement
        assert agreement is not None, "every training plan contains Agree"
        if not agreement.trains:
            return agreement
        mine = [float(unit in self._skipped) for unit in range(self._layout.units)]
        synchronize(computed)
        waits_for = "agrees on what the step left out and counted"
        with self._streams.on(Stream.REDUCTION), self._heartbeat.waiting(waits_for):
            lists = mine, statistics.flatten().tolist()
            counts, tokens = sums_of(lists, self._groups.device, self._groups.reduce_world)
        skipped = tuple(unit for unit, count in enumerate(counts) if count)
        return replace(agreement, skipped=skipped, load=ExpertLoad.of(tokens, layers=len(statistics)))


def sums_of(
    lists: Sequence[Sequence[float]], device: torch.device, group: dist.ProcessGroup | None
) -> list[list[float]]:
    """Return each list's values, summed over the group in float64. `group`: None for a single rank.

    All lists are in flight together, launched in their order. A list has the same length on all ranks, so all ranks
    skip an empty list. Each list is summed by itself, so its bits do not depend on the other lists. Call this on a side
    stream: on the compute stream it would wait for all passes launched so far.
    """
    if group is None:
        return [[*values] for values in lists]
    summed = [torch.tensor(values, dtype=torch.float64).to(device) for values in lists]
    works = [dist.all_reduce(values, group=group, async_op=True) for values in summed if len(values)]
    for work in works:
        assert work is not None, "this rank is part of the group"
        work.wait()
    return [values.tolist() for values in summed]


class UpdateThread:
    """The update thread: updates unit after unit, while the main thread computes and the reduction thread reduces."""

    def __init__(
        self,
        spec: OptimizerSpec,
        store: UnitStore,
        reductions: ReductionThread,
        groups: ProcessGroups,
        streams: Streams,
        trace: Trace,
    ) -> None:
        self._spec, self._store, self._reductions = spec, store, reductions
        self._streams, self._trace, self._heartbeat = streams, trace, groups.ranks.heartbeat
        self._thread = WorkerThread("updates", self._heartbeat.failure, streams.enter_thread)
        self._newest_updates: deque[Future[Event]] = deque(maxlen=PENDING_GRADIENTS)
        self._captures: dict[int, Future[None]] = {}
        """Unit -> its newest capture, which must be done before the unit's next update."""
        self.capture_wait_seconds = 0.0
        """Total seconds that updates have waited for captures."""

    @property
    def before_next_gradient(self) -> Future[Event] | None:
        """Update that must be done before the next gradient is kept; None: there is free memory for the gradient.

        Read this after all earlier updates are enqueued and before the next update: the result depends on the number of
        updates so far.
        """
        return self._newest_updates[0] if len(self._newest_updates) == PENDING_GRADIENTS else None

    def speculate(self, record: Speculate, rate: float, reduced: Future[None]) -> None:
        """Enqueue an update of the unit before its clip factor is known; `update` follows. `reduced`: the unit's
        reduction in this step."""
        capture, step = self._captures.get(record.unit), self._reductions.step
        self._thread.submit(lambda: self._speculate(record, rate, reduced, capture, step))

    def update(self, record: Update, rate: float) -> Future[Event]:
        """Enqueue the unit's update with this learning rate. The future yields the event after which the new weights
        can be read."""
        # Requested in the main thread: the order of the reduction thread's queue is the order of its collectives.
        # The capture stays: a skipped update does not wait for the capture, so a later update has to.
        terms, capture = self._reductions.request_terms(record), self._captures.get(record.unit)
        updated = self._thread.submit(lambda: self._update(record, rate, terms, capture))
        self._newest_updates.append(updated)
        self._store.updates.replace(record.unit, updated)
        return updated

    def wait_for_captures(self, captured: Mapping[int, Future[None]]) -> None:
        """Make the next update of each unit wait until the unit's state is captured."""
        self._captures |= captured

    def warm_up(self) -> None:
        """Orthogonalize matrices of zeros in the update thread and on its stream, while no receive is pending. cuBLAS
        makes a handle for each thread and a workspace for each stream, and may wait for all kernels then."""

        def run() -> None:
            with self._streams.on(Stream.UPDATE):
                self._store.orthogonalize_zeros()

        self._thread.submit(run).result()

    def close(self) -> None:
        self._thread.close()

    def _speculate(
        self, record: Speculate, rate: float, reduced: Future[None], capture: Future[None] | None, step: OpenStep
    ) -> None:
        with self._heartbeat.updates.waiting_behind(self._heartbeat.reductions):
            reduced.result()
        # Captures follow the order of updates, not of reductions: a wait here would hold up the updates of other units.
        if not step.may_speculate or (capture is not None and not capture.done()):
            return
        with self._trace.span("speculate", record), self._streams.on(Stream.UPDATE):
            self._store.states[record.unit].speculate(self._spec, rate)

    def _update(
        self, record: Update, rate: float, terms: Future[UpdateTerms | None], capture: Future[None] | None
    ) -> Event:
        with self._heartbeat.updates.waiting_behind(self._heartbeat.reductions):
            agreed = terms.result()
        if agreed is None:
            # Free the bounce buffer before this future completes: a later gradient waits for the future, then takes the
            # buffer.
            self._store.states[record.unit].drop_gradient()
            return None
        if capture is not None:
            self._wait_for_capture(capture, record)
        with self._trace.span("update", record), self._streams.on(Stream.UPDATE):
            self._store.states[record.unit].update(self._spec, rate, agreed.factor, agreed.idle)
            return self._streams.record_event()

    def _wait_for_capture(self, capture: Future[None], record: Update) -> None:
        begin = time.perf_counter()
        with self._trace.span("checkpoint", record, "hold"):
            capture.result()
        self.capture_wait_seconds += time.perf_counter() - begin
