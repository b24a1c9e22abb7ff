"""One rank of a phase's training: steps, evaluation, and its state unit by unit."""

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pseudoreal_trainer.engine.build import Blueprint, build_parts
from pseudoreal_trainer.engine.probe import Probe, groups_of
from pseudoreal_trainer.engine.ranks.grid import Grid
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.reductions import Agreement
from pseudoreal_trainer.engine.runner import Batch, Run, Training
from pseudoreal_trainer.engine.state.capture import Capture, Sink, Source
from pseudoreal_trainer.engine.state.memory import Content
from pseudoreal_trainer.plan.check import check_plan
from pseudoreal_trainer.plan.lower import evaluation_plan, measuring_plan, step_plan
from pseudoreal_trainer.plan.steps import Update
from pseudoreal_trainer.plan.units import KINDS, Kind, Unit


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

    def __init__(self, blueprint: Blueprint, grid: Grid, trace: Trace) -> None:
        plan = step_plan(grid.layout)
        check_plan(grid.layout, plan)
        self._blueprint, self._grid, self.trace = blueprint, grid, trace
        self._heartbeat = grid.ranks.heartbeat
        self._plan = plan[grid.pipeline_rank]
        if grid.layout.measures:
            measuring = measuring_plan(grid.layout)
            check_plan(grid.layout, measuring)
            self._measuring_plan = measuring[grid.pipeline_rank]
        self._parts = build_parts(blueprint, grid, trace)

    @property
    def units(self) -> tuple[Unit, ...]:
        return self._blueprint.units

    @property
    def master_dtype(self) -> torch.dtype:
        return self._blueprint.master

    @property
    def grid(self) -> Grid:
        return self._grid

    def has(self, unit: int) -> bool:
        """Whether some of the unit's state is on this rank."""
        return unit in self._parts.states

    def state_bytes(self) -> Counter[Content]:
        """Bytes that this rank keeps from step to step for its units, in all homes together. The window and what is on
        its way to or from it are not counted."""
        kept: Counter[Content] = Counter()
        for state in self._parts.states.values():
            kept.update(state.kept_bytes())
        return kept

    def crossing_bytes(self) -> int:
        """Bytes of the host memory through which state crosses the bus; all of it is pinned where there is a GPU."""
        return self._parts.region.size

    def pinned_bytes(self) -> int:
        """Bytes of all host memory that this rank has pinned."""
        return self._parts.memory.pinned

    def window_bytes(self) -> int:
        """Bytes of the slots for working copies that come and go."""
        return self._parts.copies.slot_bytes

    def train(self, batch: Batch, training: Training, step: int, probe: Probe | None = None) -> Agreement:
        """Trains one step, measured with `probe`. It returns when its loss is known and, where single updates may be
        left out, when it is known which are; updates go on into the next call."""
        self.trace.begin(step)
        self._parts.reductions.begin(step)
        run = Run(self._parts, batch, training, probe)
        run.go(self._plan if probe is None else self._measuring_plan)
        assert run.agreement is not None, "a training plan agrees"
        agreed = self._parts.reductions.end() if self._may_leave_out_units else run.agreement
        return self._heartbeat.join(agreed, self._heartbeat.reductions)

    @property
    def _may_leave_out_units(self) -> bool:
        return self._blueprint.optimizer.non_finite == "Skip" and self._grid.layout.clipping != "Global"

    def probe(self, next_blocks: Sequence[int] | None) -> Probe:
        """A probe for one step. `next_blocks`: entry l is the block of layer l in the next phase; None: only neighbours
        are compared."""
        layout = self._grid.layout
        groups = () if next_blocks is None else groups_of(layout.layer_blocks, next_blocks)
        return Probe(self._grid, self.units, self._parts.modules, self.master_dtype, groups)

    def evaluate(self, batch: Batch, micro_batches: int) -> dict[int, float]:
        """Micro-batch -> sum of the loss over its tokens, in nats. Empty on ranks without the head."""
        layout = replace(self._grid.layout, micro_batches=micro_batches)
        run = Run(self._parts, batch, None)
        run.go(evaluation_plan(layout)[self._grid.pipeline_rank])
        return {m: float(loss) for m, loss in run.losses.items()}

    def extent(self, unit: int) -> range:
        """The part of the unit's flat vector that this rank has, padding included."""
        extent = self._parts.states[unit].extent
        return range(extent.begin, extent.begin + extent.length)

    def put(self, unit: int, state: UnitState) -> None:
        """Sets the state of a unit that this rank has."""
        mine = self._parts.states[unit]
        for kind in KINDS:
            mine.put(kind, state.vectors[kind])
        mine.steps.fill_(state.steps)
        self._parts.copies.changed(unit)

    def order_of_updates(self) -> list[int]:
        return [step.unit for step in self._plan if isinstance(step, Update)]

    def capture(self, spans: Mapping[int, range], sink: Sink, buffer_bytes: int) -> Future[None]:
        """Hands the state of the newest step to the sink, unit by unit in the order of `spans`: those ranges of the
        units' flat vectors. Training may go on meanwhile. The future ends when the sink has all of it."""
        sources = [self._source(unit, span) for unit, span in spans.items()]
        crosses = any(self._grid.layout.home(unit) == "Device" for unit in spans)
        ring = self._parts.captures.ring(buffer_bytes, crosses=crosses)
        capture = Capture(sources, sink, ring, self._parts.lanes, self.trace)
        self._parts.updates.holds |= capture.captured
        return capture.start()

    def _source(self, unit: int, span: range) -> Source:
        state = self._parts.states[unit]
        begin, end = (place - state.extent.begin for place in (span.start, span.stop))
        return Source(unit, state, begin, end, self._parts.copies.updated[unit])

    @property
    def held_seconds(self) -> float:
        """Seconds that updates have waited for captures so far."""
        return self._parts.updates.held_seconds

    def settle(self) -> None:
        """Waits for all updates."""
        self._parts.copies.settle()

    def close(self) -> None:
        self._parts.reductions.close()
        self._parts.updates.close()
        for state in self._parts.states.values():
            state.close()
        # Last: no copy and no request uses them any more.
        for memory in (self._parts.stashes, self._parts.tokens, self._parts.captures, self._parts.region):
            memory.close()
        self._grid.close()
