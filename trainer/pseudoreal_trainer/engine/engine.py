"""One rank of a phase's training: executes step plans record by record and holds this rank's shards of the units."""

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import assert_never

import torch
from pseudoreal_api.resolved.layers import blocks_of_layers, experts_of_layers
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.optimizer import Optimizer as OptimizerSpec
from pseudoreal_api.spec.phase import Sharing
from torch import Tensor

from pseudoreal_trainer.engine.balance import NO_LOADS
from pseudoreal_trainer.engine.copies import Copies
from pseudoreal_trainer.engine.passes import Batch, Passes, PlanRun, Training
from pseudoreal_trainer.engine.probe import LayerGroup, Probe, groups_of
from pseudoreal_trainer.engine.ranks.exchanges import Exchanges
from pseudoreal_trainer.engine.ranks.messages import Messages
from pseudoreal_trainer.engine.ranks.process_groups import ProcessGroups
from pseudoreal_trainer.engine.ranks.streams import RunAheadLimit, Streams
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.spread import SpreadPasses
from pseudoreal_trainer.engine.stash import StashedInputs
from pseudoreal_trainer.engine.state.capture import Capture, Sink, Source
from pseudoreal_trainer.engine.state.memory import Purpose
from pseudoreal_trainer.engine.state.ring import KeptRing
from pseudoreal_trainer.engine.state.store import UnitStore
from pseudoreal_trainer.engine.tokens import TokenBuffer
from pseudoreal_trainer.engine.updates import Agreement, Gradients, ReductionThread, UpdateThread
from pseudoreal_trainer.engine.warm_up import warm_up
from pseudoreal_trainer.model.experts import Tally
from pseudoreal_trainer.model.head import soft_cap_of
from pseudoreal_trainer.model.loss import Loss
from pseudoreal_trainer.model.modules import Modules
from pseudoreal_trainer.plan.check import check_plan
from pseudoreal_trainer.plan.lower import evaluation_plan, measuring_plan, step_plan
from pseudoreal_trainer.plan.memory.activations import max_offloaded_activations
from pseudoreal_trainer.plan.memory.pinned_arena import needs_tokens
from pseudoreal_trainer.plan.parts import units_of_rank
from pseudoreal_trainer.plan.records import (
    Agree,
    Backward,
    Count,
    Drop,
    Exchange,
    ExpertBackward,
    ExpertForward,
    Fetch,
    Forward,
    Measure,
    Pass,
    RankPlan,
    Read,
    Receive,
    Recompute,
    Record,
    Reduce,
    Route,
    Send,
    Stash,
    SumChoices,
    Unstash,
    Update,
)
from pseudoreal_trainer.plan.units import KINDS, Kind, Unit

_AHEAD = 2
"""Passes that the main thread may launch ahead of the GPU; enough that the GPU never waits for the thread."""


@dataclass(frozen=True)
class Blueprint:
    """Configuration of an engine."""

    model: Model
    optimizer: OptimizerSpec
    units: tuple[Unit, ...]
    master: torch.dtype
    compute: torch.dtype
    compiled: bool
    offload_directory: Path
    end_of_document: int | None = None
    """Token id that ends a document; attention stays within documents. None: attention spans whole sequences."""


@dataclass(frozen=True)
class UnitState:
    """This rank's shard of a unit's state. Vectors are on the CPU, [length of the extent], in the master dtype."""

    vectors: dict[Kind, Tensor]
    steps: int
    """Number of updates done."""

    @classmethod
    def fresh(cls, weights: Mapping[str, Tensor], extent: range) -> "UnitState":
        """Return the state before the first update: `weights` cut to `extent` and padded with zeros, and zero moments.
        `weights`: all parameters of the unit, in order."""
        flat = torch.cat([tensor.flatten() for tensor in weights.values()])[extent.start : extent.stop]
        mine = torch.cat([flat, flat.new_zeros(len(extent) - len(flat))])
        zeros = torch.zeros_like(mine)
        return cls({"weights": mine, "first_moment": zeros, "second_moment": zeros}, 0)


class Engine:
    """One rank's training engine. Every rank creates one and calls the same methods in the same order."""

    def __init__(self, blueprint: Blueprint, groups: ProcessGroups, trace: Trace) -> None:
        """Raises PlanError if the layout's plan is invalid, TrainingError if a home has too little room for the
        state."""
        self._blueprint, self.groups, self._layout, self.trace = blueprint, groups, groups.layout, trace
        self.units = units_of_rank(groups.layout, blueprint.units, groups.ranks.rank)
        """Units as this rank holds them: with expert parallelism, a unit of experts contains only this rank's
        experts."""
        self._plan = self._checked(step_plan(groups.layout))
        self._measuring_plan = self._checked(measuring_plan(groups.layout)) if groups.layout.measures else self._plan
        streams = self._streams = Streams(groups.device)
        store = self._store = UnitStore(
            blueprint.model,
            blueprint.optimizer,
            self.units,
            groups,
            trace,
            master=blueprint.master,
            compute=blueprint.compute,
            folder=blueprint.offload_directory,
        )
        modules = Modules(blueprint.model, self.units, blueprint.compute, compiled=blueprint.compiled)
        self._copies = Copies(store, groups, streams, trace)
        self._gradients = Gradients(store, modules, groups, streams, trace)
        self._reductions = ReductionThread(blueprint.optimizer, store, groups, streams, trace, blueprint.model.top_k)
        self._updates = UpdateThread(blueprint.optimizer, store, self._reductions, groups, streams, trace)
        self._messages = Messages(groups, blueprint.compute, trace)
        self._stashed = StashedInputs(streams, trace, store.memory, groups.device)
        self._tokens = TokenBuffer(streams, groups.device, store.memory)
        self._ring = KeptRing(store.memory)
        self._passes = Passes(
            layout=groups.layout,
            modules=modules,
            copies=self._copies,
            gradients=self._gradients,
            messages=self._messages,
            stashed=self._stashed,
            tokens=self._tokens,
            streams=streams,
            trace=trace,
            loss=Loss(
                dtype=blueprint.master,
                chunk=groups.layout.loss_chunk,
                soft_cap=soft_cap_of(blueprint.model),
                z_factor=float(blueprint.optimizer.z_loss),
            ),
            end_of_document=blueprint.end_of_document,
        )
        self._spread = SpreadPasses(self._passes, Exchanges(groups, trace))

    # Steps.

    def train(self, batch: Batch, training: Training, step: int, probe: Probe | None = None) -> Agreement:
        """Run one training step, measured by `probe` if given, and return its agreement.

        Returns when all ranks know the loss, the skipped units and the expert load. Updates continue into the next
        call.
        """
        self.trace.begin(step)
        self._reductions.begin(step)
        run = PlanRun(batch, training, probe=probe)
        self._run(self._plan if probe is None else self._measuring_plan, run)
        assert run.agreement is not None, "every training plan contains Agree"
        agreed = run.agreement if self._agrees_on_all else self._reductions.end(self._loads(run))
        heartbeat = self.groups.ranks.heartbeat
        return heartbeat.join(agreed, heartbeat.reductions)

    def evaluate(self, batch: Batch, micro_batches: int) -> dict[int, float]:
        """Return, for each micro-batch, the cross-entropy summed over its tokens, in nats. Empty on ranks without the
        head."""
        run = PlanRun(batch, None)
        self._evaluate(run, micro_batches)
        return {m: float(losses.cross_entropy) for m, losses in run.losses.items()}

    def logits(self, batch: Batch, positions: Sequence[int]) -> dict[int, Tensor]:
        """Return, for each micro-batch m, the logits of the token after `positions[m]`, [V], in the dtype of the loss.

        Each micro-batch has one sequence, and there is one micro-batch per position. Empty on ranks without the head.
        """
        run = PlanRun(batch, None, reads=positions)
        self._evaluate(run, len(positions))
        return run.logits

    @property
    def padding(self) -> int:
        """Padding token that ends no document; each end token would add a document, which is computed separately."""
        return 1 if self._blueprint.end_of_document == 0 else 0

    def _evaluate(self, run: PlanRun, micro_batches: int) -> None:
        layout = replace(self._layout, micro_batches=micro_batches)
        self._run(evaluation_plan(layout)[self.groups.pipeline_rank], run)

    def _run(self, plan: RankPlan, run: PlanRun) -> None:
        """Execute the records of a plan in order."""
        is_limited = self._layout.stash or self._layout.pipeline > 1
        limit = RunAheadLimit(self._streams, _AHEAD if is_limited else None)
        self._prepare(plan, run)
        self._spread.begin()
        for record in plan:
            self._execute(record, run)
            if isinstance(record, Pass):
                # Updates may have finished during the pass: start the fetches that waited for them before a record
                # needs their weights.
                self._copies.begin_ready()
                limit.called()
        self._stashed.finish()
        self._messages.finish()

    def _execute(self, record: Record, run: PlanRun) -> None:
        match record:
            case Read():
                self._copies.read(record)
            case Fetch():
                self._copies.fetch(record)
            case Drop():
                self._copies.drop(record)
            case Forward():
                (self._spread if self._layout.spreads(record.position) else self._passes).forward(run, record)
            case Backward():
                run.choices_of_step.finish(record.position, self.groups, self.trace)
                (self._spread if self._layout.spreads(record.position) else self._passes).backward(run, record)
            case Route() | Count() | Exchange() | ExpertForward() | Recompute() | ExpertBackward():
                self._spread.execute(run, record)
            case SumChoices():
                run.choices_of_step.begin_sum(record, self.groups, self.trace)
            case Send():
                self._messages.send(record, run.crossing(record.flow).pop((record.position, record.micro_batch)))
            case Receive():
                # An activation and its gradient have the shape of the micro-batch.
                self._messages.receive(
                    record, (*run.batch.shape(record.micro_batch), self._blueprint.model.hidden_size)
                )
            case Stash():
                self._stashed.stash(record, run.inputs.pop((record.position, record.micro_batch)))
            case Unstash():
                self._stashed.unstash(record)
            case Measure():
                self._measure(record, run)
            case Reduce():
                # Pending fetches use the same group: every rank launches them before this sum, so that all ranks launch
                # their collectives in plan order.
                self._copies.begin_all()
                after = self._updates.before_next_gradient
                self._reductions.reduce(record, self._gradients.reduce(record.unit), after)
            case Agree():
                stop, finish = run.training_step.stop, run.training_step.finish
                loads = self._loads(run) if self._agrees_on_all else NO_LOADS
                run.agreement = self._reductions.agree(record, run.loss_sums(), loads, stop=stop, finish=finish)
            case Update():
                self._copies.updated[record.unit] = self._updates.update(record, run.training_step.rate)
            case _:
                assert_never(record)

    def _measure(self, record: Measure, run: PlanRun) -> None:
        assert run.probe is not None, "only measuring plans contain Measure"
        # Pending fetches use the same group: every rank launches them before this sum, so that all ranks launch their
        # collectives in plan order.
        self._copies.begin_all()
        with self.trace.executed("measure", record, self._streams):
            run.probe.finish(record.position)

    def _prepare(self, plan: RankPlan, run: PlanRun) -> None:
        """Warm up passes of new shapes, then allocate the host memory that depends on the batch, unless it exists.

        Runs before the first message is awaited, because warming up and pinning memory may wait for all kernels.
        """
        if self._streams.are_real and self._layout.pipeline > 1:
            warm_up(self._passes, run.batch, plan)
        stashes = self._layout.stash and run.training is not None
        masks = self._blueprint.end_of_document is not None
        takes = self._streams.are_real and needs_tokens(self._layout, self.groups.pipeline_rank, masks_documents=masks)
        if not (takes or stashes):
            return
        shapes = [run.batch.shape(m) for m in {record.micro_batch for record in plan if isinstance(record, Forward)}]
        if takes:
            self._tokens.prepare(shapes)
        if stashes:
            numel = max(sequences * length for sequences, length in shapes) * self._blueprint.model.hidden_size
            self._stashed.prepare(max_offloaded_activations(plan), numel, self._blueprint.compute)

    def _loads(self, run: PlanRun) -> Tensor:
        """Return the router statistics of this rank's passes, [layers with experts, experts + Tally.OTHERS].

        Rows of other ranks' layers are zero. The tensor is empty if the model has no experts.
        """
        model = self._blueprint.model
        if model.experts is None:
            return NO_LOADS
        none = torch.zeros(model.experts.count + Tally.OTHERS, dtype=torch.float64, device=self.groups.device)
        layers = [layer for layer in range(model.layers) if model.has_experts(layer)]
        return torch.stack([run.loads.get(layer + 1, none) for layer in layers])

    @property
    def _agrees_on_all(self) -> bool:
        """True if all values of the agreement are known when Agree is executed.

        With global clipping, Agree follows all passes. Otherwise it comes among them, before the expert load and the
        skipped units are known; `ReductionThread.end` then agrees on these.
        """
        counts, skips = self._blueprint.model.experts is not None, self._blueprint.optimizer.non_finite == "Skip"
        return self._layout.clipping == "Global" or not (counts or skips)

    def _checked(self, plan: tuple[RankPlan, ...]) -> RankPlan:
        """Check the plan of all pipeline ranks and return this rank's part. Raises PlanError if the plan is invalid."""
        check_plan(self._layout, plan)
        return plan[self.groups.pipeline_rank]

    def probe(self, next_sharing: Sharing | None) -> Probe:
        """Return a probe for one step. `next_sharing`: sharing of the next phase; None: only neighbours are
        compared."""
        model, layer_groups = self._blueprint.model, tuple[LayerGroup, ...]()
        if next_sharing is not None:
            next_blocks = blocks_of_layers(next_sharing, model.layers)
            layer_groups = groups_of(self._layout, next_blocks, experts_of_layers(next_sharing, model))
        return Probe(self.groups, self.whole_units, self._passes.modules, self.master_dtype, layer_groups)

    # The state, between steps.

    @property
    def whole_units(self) -> tuple[Unit, ...]:
        """Units of the model with all experts, whichever part of them this rank holds."""
        return self._blueprint.units

    @property
    def master_dtype(self) -> torch.dtype:
        return self._blueprint.master

    def has(self, unit: int) -> bool:
        """Return whether this rank holds a part of the unit's state."""
        return unit in self._store.states

    def extent(self, unit: int) -> range:
        """Return the range of the unit's flat vector that this rank holds, including padding."""
        extent = self._store.states[unit].extent
        return range(extent.begin, extent.begin + extent.length)

    def put(self, unit: int, state: UnitState) -> None:
        """Set the state of a unit that this rank holds."""
        mine = self._store.states[unit]
        for kind in KINDS:
            mine.put(kind, state.vectors[kind])
        mine.steps.fill_(state.steps)
        self._copies.changed(unit)

    def order_of_updates(self) -> list[int]:
        return [record.unit for record in self._plan if isinstance(record, Update)]

    def capture(self, spans: Mapping[int, range], sink: Sink, buffer_bytes: int) -> Future[None]:
        """Start a snapshot of the newest step's state and return its future.

        The sink gets the units in the order of `spans`: unit -> range of its flat vector. Training may continue
        meanwhile. The future completes when the sink has everything.
        """
        sources = [self._source(unit, span) for unit, span in spans.items()]
        crosses = any(self._layout.home(unit) == "Device" for unit in spans)
        ring = self._ring.ring(buffer_bytes, crosses=crosses)
        capture = Capture(sources, sink, ring, self._streams, self.trace)
        self._updates.captures |= capture.captured
        return capture.start()

    def _source(self, unit: int, span: range) -> Source:
        state = self._store.states[unit]
        begin, end = (index - state.extent.begin for index in (span.start, span.stop))
        return Source(unit, state, begin, end, self._copies.updated[unit])

    @property
    def capture_wait_seconds(self) -> float:
        """Total seconds that updates have waited for captures."""
        return self._updates.capture_wait_seconds

    # Memory.

    def state_bytes(self) -> Counter[Purpose]:
        """Return the bytes that this rank keeps between steps for its units, in all homes together.

        Excludes the window and the buffers on the way to and from it.
        """
        kept: Counter[Purpose] = Counter()
        for state in self._store.states.values():
            kept.update(state.kept_bytes())
        # Resident copies of units with another home than the device; other resident copies are counted with their
        # states.
        gathered = (flat for unit, flat in self._store.resident.items() if self._layout.home(unit) != "Device")
        kept["weights"] += sum(flat.nbytes for flat in gathered)
        return kept

    def crossing_bytes(self) -> int:
        """Return the bytes of the host arena through which state crosses the bus; pinned if there is a GPU."""
        return self._store.region.size

    def pinned_bytes(self) -> int:
        """Return the bytes of all host memory that this rank has pinned."""
        return self._store.memory.pinned

    def window_bytes(self) -> int:
        """Return the bytes of the window's slots."""
        return sum(slot.nbytes for slots in self._store.window.values() for slot in slots)

    def settle(self) -> None:
        """Wait for all updates. Raises the error of an update that failed."""
        self._copies.settle()

    def close(self) -> None:
        self._reductions.close()
        self._updates.close()
        # Last: the threads have ended, so no copy and no disk request uses this memory.
        for memory in (self._stashed, self._tokens, self._ring, self._store):
            memory.close()
        self.groups.close()
