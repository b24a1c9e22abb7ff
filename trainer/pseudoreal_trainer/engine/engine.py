"""One rank of a phase's training: it runs the records of step plans, and has the rank's state, unit by unit."""

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
from pseudoreal_trainer.engine.ranks.lanes import Lanes, Throttle
from pseudoreal_trainer.engine.ranks.mesh import Mesh
from pseudoreal_trainer.engine.ranks.messages import Messages
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.spread import SpreadPasses
from pseudoreal_trainer.engine.stash import StashedInputs
from pseudoreal_trainer.engine.state.capture import Capture, Sink, Source
from pseudoreal_trainer.engine.state.memory import Purpose
from pseudoreal_trainer.engine.state.ring import KeptRing
from pseudoreal_trainer.engine.state.store import UnitStore
from pseudoreal_trainer.engine.tokens import TokenBuffer
from pseudoreal_trainer.engine.updates import Agreement, Gradients, Reductions, Updates
from pseudoreal_trainer.engine.warm_up import warm_up
from pseudoreal_trainer.forecast.memory.activations import most_stashed
from pseudoreal_trainer.forecast.memory.crossing import takes_tokens
from pseudoreal_trainer.model.experts import Tally
from pseudoreal_trainer.model.head import soft_cap_of
from pseudoreal_trainer.model.loss import Loss
from pseudoreal_trainer.model.modules import Modules
from pseudoreal_trainer.plan.check import check_plan
from pseudoreal_trainer.plan.lower import evaluation_plan, measuring_plan, step_plan
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
"""Number of passes that are called ahead: enough that the GPU never waits for the thread that calls them."""


@dataclass(frozen=True)
class Blueprint:
    """What an engine is made from."""

    model: Model
    optimizer: OptimizerSpec
    units: tuple[Unit, ...]
    master: torch.dtype
    compute: torch.dtype
    compiled: bool
    offload_directory: Path
    end_of_document: int | None = None
    """The token that ends documents, within which tokens attend; None: they attend in whole sequences."""


@dataclass(frozen=True)
class UnitState:
    """This rank's part of a unit's state: each vector on the CPU, [length of the extent], in the master type."""

    vectors: dict[Kind, Tensor]
    steps: int
    """Number of updates done."""

    @classmethod
    def fresh(cls, weights: Mapping[str, Tensor], extent: range) -> "UnitState":
        """The state before the first update. `weights`: those of all the unit's parameters, in their order."""
        flat = torch.cat([tensor.flatten() for tensor in weights.values()])[extent.start : extent.stop]
        mine = torch.cat([flat, flat.new_zeros(len(extent) - len(flat))])
        zeros = torch.zeros_like(mine)
        return cls({"weights": mine, "first_moment": zeros, "second_moment": zeros}, 0)


class Engine:
    """One rank's part in training. Every rank makes one and calls the same methods in the same order."""

    def __init__(self, blueprint: Blueprint, mesh: Mesh, trace: Trace) -> None:
        """Raises PlanError where the layout's plan is unsound, TrainingError where a home has no room for the state."""
        self._blueprint, self.mesh, self._layout, self.trace = blueprint, mesh, mesh.layout, trace
        self.units = units_of_rank(mesh.layout, blueprint.units, mesh.ranks.rank)
        """The units as this rank has them: where experts are spread over ranks, with its own alone."""
        self._plan = self._checked(step_plan(mesh.layout))
        self._measuring_plan = self._checked(measuring_plan(mesh.layout)) if mesh.layout.measures else self._plan
        lanes = self._lanes = Lanes(mesh.device)
        store = self._store = UnitStore(
            blueprint.model,
            blueprint.optimizer,
            self.units,
            mesh,
            trace,
            master=blueprint.master,
            compute=blueprint.compute,
            folder=blueprint.offload_directory,
        )
        modules = Modules(blueprint.model, self.units, blueprint.compute, compiled=blueprint.compiled)
        self._copies = Copies(store, mesh, lanes, trace)
        self._gradients = Gradients(store, modules, mesh, lanes, trace)
        self._reductions = Reductions(blueprint.optimizer, store, mesh, lanes, trace, blueprint.model.top_k)
        self._updates = Updates(blueprint.optimizer, store, self._reductions, mesh, lanes, trace)
        self._messages = Messages(mesh, blueprint.compute, trace)
        self._stashed = StashedInputs(lanes, trace, store.memory, mesh.device)
        self._tokens = TokenBuffer(lanes, mesh.device, store.memory)
        self._ring = KeptRing(store.memory)
        self._passes = Passes(
            layout=mesh.layout,
            modules=modules,
            copies=self._copies,
            gradients=self._gradients,
            messages=self._messages,
            stashed=self._stashed,
            tokens=self._tokens,
            lanes=lanes,
            trace=trace,
            loss=Loss(
                dtype=blueprint.master,
                chunk=mesh.layout.loss_chunk,
                soft_cap=soft_cap_of(blueprint.model),
                z_factor=float(blueprint.optimizer.z_loss),
            ),
            end_of_document=blueprint.end_of_document,
        )
        self._spread = SpreadPasses(self._passes, Exchanges(mesh, trace))

    # Steps.

    def train(self, batch: Batch, training: Training, step: int, probe: Probe | None = None) -> Agreement:
        """Trains one step, measured with `probe`. It returns when its loss is known and, where single updates may be
        left out or experts are chosen by top k, when it is known which are and how many tokens these got; updates go on
        into the next call."""
        self.trace.begin(step)
        self._reductions.begin(step)
        run = PlanRun(batch, training, probe=probe)
        self._run(self._plan if probe is None else self._measuring_plan, run)
        assert run.agreement is not None, "a training plan agrees"
        agreed = run.agreement if self._agrees_on_all else self._reductions.end(self._loads(run))
        heartbeat = self.mesh.ranks.heartbeat
        return heartbeat.join(agreed, heartbeat.reductions)

    def evaluate(self, batch: Batch, micro_batches: int) -> dict[int, float]:
        """Micro-batch -> sum of the cross-entropy over its tokens, in nats. Empty on ranks without the head."""
        run = PlanRun(batch, None)
        self._evaluate(run, micro_batches)
        return {m: float(losses.cross_entropy) for m, losses in run.losses.items()}

    def logits(self, batch: Batch, positions: Sequence[int]) -> dict[int, Tensor]:
        """Micro-batch -> logits of the token that follows the one at its position, [V], in the type of the loss. The
        micro-batches, as many as positions, have one sequence each. Empty on ranks without the head."""
        run = PlanRun(batch, None, reads=positions)
        self._evaluate(run, len(positions))
        return run.logits

    @property
    def padding(self) -> int:
        """A token that ends no document: each end would be one more, which is computed by itself."""
        return 1 if self._blueprint.end_of_document == 0 else 0

    def _evaluate(self, run: PlanRun, micro_batches: int) -> None:
        layout = replace(self._layout, micro_batches=micro_batches)
        self._run(evaluation_plan(layout)[self.mesh.pipeline_rank], run)

    def _run(self, plan: RankPlan, run: PlanRun) -> None:
        """Takes the records of a plan from first to last."""
        is_limited = self._layout.stash or self._layout.pipeline > 1
        throttle = Throttle(self._lanes, _AHEAD if is_limited else None)
        self._prepare(plan, run)
        self._spread.begin()
        for record in plan:
            self._execute(record, run)
            if isinstance(record, Pass):
                # Updates have ended meanwhile: what waits for them need not wait for the record that needs it.
                self._copies.begin_ready()
                throttle.called()
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
                run.choices_of_step.finish(record.position, self.mesh, self.trace)
                (self._spread if self._layout.spreads(record.position) else self._passes).backward(run, record)
            case Route() | Count() | Exchange() | ExpertForward() | Recompute() | ExpertBackward():
                self._spread.execute(run, record)
            case SumChoices():
                run.choices_of_step.begin_sum(record, self.mesh, self.trace)
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
                # The fetches before this record gather in the same group: every rank calls them before this sum.
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
        assert run.probe is not None, "only a measuring plan asks"
        # The fetches before this record gather in the same group: every rank calls them before this sum.
        self._copies.begin_all()
        with self.trace.executed("measure", record, self._lanes):
            run.probe.finish(record.position)

    def _prepare(self, plan: RankPlan, run: PlanRun) -> None:
        """Makes the host memory that depends on the batch, where there is none yet, and tries passes of new shapes:
        before the first message is awaited."""
        if self._lanes.are_real and self._layout.pipeline > 1:
            warm_up(self._passes, run.batch, plan)
        stashes = self._layout.stash and run.training is not None
        masks = self._blueprint.end_of_document is not None
        takes = self._lanes.are_real and takes_tokens(self._layout, self.mesh.pipeline_rank, masks_documents=masks)
        if not (takes or stashes):
            return
        shapes = [run.batch.shape(m) for m in {record.micro_batch for record in plan if isinstance(record, Forward)}]
        if takes:
            self._tokens.prepare(shapes)
        if stashes:
            numel = max(sequences * length for sequences, length in shapes) * self._blueprint.model.hidden_size
            self._stashed.prepare(most_stashed(plan), numel, self._blueprint.compute)

    def _loads(self, run: PlanRun) -> Tensor:
        """What this rank's passes learned of experts, [layers with experts, experts + Tally.OTHERS]; zeros for layers
        of other ranks, and empty where there are no experts."""
        model = self._blueprint.model
        if model.experts is None:
            return NO_LOADS
        none = torch.zeros(model.experts.count + Tally.OTHERS, dtype=torch.float64, device=self.mesh.device)
        layers = [layer for layer in range(model.layers) if model.has_experts(layer)]
        return torch.stack([run.loads.get(layer + 1, none) for layer in layers])

    @property
    def _agrees_on_all(self) -> bool:
        """Whether all that a step agrees on is known when the record Agree is executed. With global clipping that comes
        behind all passes; otherwise it comes among them, and what they count and leave out is not known yet."""
        counts, skips = self._blueprint.model.experts is not None, self._blueprint.optimizer.non_finite == "Skip"
        return self._layout.clipping == "Global" or not (counts or skips)

    def _checked(self, plan: tuple[RankPlan, ...]) -> RankPlan:
        """This rank's part of a plan that was proved."""
        check_plan(self._layout, plan)
        return plan[self.mesh.pipeline_rank]

    def probe(self, next_sharing: Sharing | None) -> Probe:
        """A probe for one step. `next_sharing`: that of the next phase; None: only neighbours are compared."""
        model, groups = self._blueprint.model, tuple[LayerGroup, ...]()
        if next_sharing is not None:
            next_blocks = blocks_of_layers(next_sharing, model.layers)
            groups = groups_of(self._layout, next_blocks, experts_of_layers(next_sharing, model))
        return Probe(self.mesh, self.whole_units, self._passes.modules, self.master_dtype, groups)

    # The state, between steps.

    @property
    def whole_units(self) -> tuple[Unit, ...]:
        """The units of the model, whatever part of them this rank has."""
        return self._blueprint.units

    @property
    def master_dtype(self) -> torch.dtype:
        return self._blueprint.master

    def has(self, unit: int) -> bool:
        """Whether some of the unit's state is on this rank."""
        return unit in self._store.states

    def extent(self, unit: int) -> range:
        """The part of the unit's flat vector that this rank has, padding included."""
        extent = self._store.states[unit].extent
        return range(extent.begin, extent.begin + extent.length)

    def put(self, unit: int, state: UnitState) -> None:
        """Sets the state of a unit that this rank has."""
        mine = self._store.states[unit]
        for kind in KINDS:
            mine.put(kind, state.vectors[kind])
        mine.steps.fill_(state.steps)
        self._copies.changed(unit)

    def order_of_updates(self) -> list[int]:
        return [record.unit for record in self._plan if isinstance(record, Update)]

    def capture(self, spans: Mapping[int, range], sink: Sink, buffer_bytes: int) -> Future[None]:
        """Hands the state of the newest step to the sink, unit by unit in the order of `spans`: those ranges of the
        units' flat vectors. Training may go on meanwhile. The future ends when the sink has all of it."""
        sources = [self._source(unit, span) for unit, span in spans.items()]
        crosses = any(self._layout.home(unit) == "Device" for unit in spans)
        ring = self._ring.ring(buffer_bytes, crosses=crosses)
        capture = Capture(sources, sink, ring, self._lanes, self.trace)
        self._updates.holds |= capture.captured
        return capture.start()

    def _source(self, unit: int, span: range) -> Source:
        state = self._store.states[unit]
        begin, end = (index - state.extent.begin for index in (span.start, span.stop))
        return Source(unit, state, begin, end, self._copies.updated[unit])

    @property
    def held_seconds(self) -> float:
        """Seconds that updates have waited for captures so far."""
        return self._updates.held_seconds

    # Memory.

    def state_bytes(self) -> Counter[Purpose]:
        """Bytes that this rank keeps from step to step for its units, in all homes together. The window and what is on
        its way to or from it are not counted."""
        kept: Counter[Purpose] = Counter()
        for state in self._store.states.values():
            kept.update(state.kept_bytes())
        # Copies that stay although their units' homes are elsewhere; others are counted with the states.
        gathered = (flat for unit, flat in self._store.resident.items() if self._layout.home(unit) != "Device")
        kept["weights"] += sum(flat.nbytes for flat in gathered)
        return kept

    def crossing_bytes(self) -> int:
        """Bytes of the host memory through which state crosses the bus; all of it is pinned where there is a GPU."""
        return self._store.region.size

    def pinned_bytes(self) -> int:
        """Bytes of all host memory that this rank has pinned."""
        return self._store.memory.pinned

    def window_bytes(self) -> int:
        """Bytes of the slots for working copies that come and go."""
        return sum(slot.nbytes for slots in self._store.window.values() for slot in slots)

    def settle(self) -> None:
        """Waits for all updates, and raises what they raised."""
        self._copies.settle()

    def close(self) -> None:
        self._reductions.close()
        self._updates.close()
        # When no copy and no request uses them any more.
        for memory in (self._stashed, self._tokens, self._ring, self._store):
            memory.close()
        self.mesh.close()
