"""One rank of a phase's training: steps, evaluation, and its state unit by unit."""

from collections import Counter
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from pseudoreal_trainer.engine.build import Blueprint, build_parts
from pseudoreal_trainer.engine.grid import Grid
from pseudoreal_trainer.engine.modules import views
from pseudoreal_trainer.engine.runner import Batch, Run, Training
from pseudoreal_trainer.engine.state import KINDS, Content, Kind
from pseudoreal_trainer.engine.trace import Trace
from pseudoreal_trainer.engine.updates import Agreement
from pseudoreal_trainer.plan.check import check_plan
from pseudoreal_trainer.plan.lower import evaluation_plan, step_plan
from pseudoreal_trainer.plan.units import Unit

FIRST = 0
"""World rank that writes checkpoints."""


@dataclass(frozen=True)
class UnitState:
    """A unit's state, whole: parameter -> tensor on the CPU, in the master type."""

    vectors: dict[Kind, dict[str, Tensor]]
    steps: Tensor


class Engine:
    """Every rank makes one and calls the same methods in the same order."""

    def __init__(self, blueprint: Blueprint, grid: Grid, trace: Trace) -> None:
        plan = step_plan(grid.layout)
        check_plan(grid.layout, plan)
        self._blueprint, self._grid, self.trace = blueprint, grid, trace
        self._plan = plan[grid.pipeline_rank]
        self._parts = build_parts(blueprint, grid, self._plan, trace)

    @property
    def units(self) -> tuple[Unit, ...]:
        return self._blueprint.units

    @property
    def master_dtype(self) -> torch.dtype:
        return self._blueprint.master

    @property
    def grid(self) -> Grid:
        return self._grid

    @property
    def writes(self) -> bool:
        """This rank is the one that `collect` brings states to."""
        return self._grid.ranks.rank == FIRST

    def has(self, unit: int) -> bool:
        """Some of the unit's state is on this rank."""
        return unit in self._parts.states

    def state_bytes(self) -> Counter[Content]:
        """That this rank keeps from step to step for its units, in all homes together; without the window and what is
        on its way."""
        kept: Counter[Content] = Counter()
        for state in self._parts.states.values():
            kept.update(state.kept_bytes())
        return kept

    def window_bytes(self) -> int:
        """Of the slots for working copies that come and go."""
        return self._parts.copies.slot_bytes

    def train(self, batch: Batch, training: Training, step: int) -> Agreement:
        """One step. Returns when its loss is known; updates may go on into the next call."""
        self.trace.begin(step)
        run = Run(self._parts, batch, training)
        run.go(self._plan)
        assert run.agreement is not None, "a training plan agrees"
        return run.agreement.result()

    def evaluate(self, batch: Batch, micro_batches: int) -> dict[int, float]:
        """Micro-batch -> sum over its tokens of the loss, nats. Empty on ranks without the head."""
        layout = replace(self._grid.layout, micro_batches=micro_batches)
        run = Run(self._parts, batch, None)
        run.go(evaluation_plan(layout)[self._grid.pipeline_rank])
        return {m: float(loss) for m, loss in run.losses.items()}

    def put(self, unit: int, state: UnitState) -> None:
        """Sets the state of a unit that this rank has."""
        mine = self._parts.states[unit]
        for kind in KINDS:
            whole = self._flat(unit, state.vectors[kind])
            mine.put(kind, whole[mine.extent.begin : mine.extent.begin + mine.extent.length])
        mine.steps.copy_(state.steps)
        self._parts.copies.changed(unit)

    def collect(self, unit: int) -> UnitState | None:
        """The state of a unit, brought together on the first rank; None on the others. Call `settle` before."""
        mine = self._parts.states.get(unit)
        size = self.units[unit].shard_length(self._grid.layout.shards) * self._grid.layout.shards
        wholes = {kind: self._brought(unit, self._whole(unit, kind), size, self.master_dtype) for kind in KINDS}
        steps = self._brought(unit, None if mine is None else mine.steps.cpu().reshape(1), 1, torch.float32)
        if steps is None:
            return None
        vectors = {kind: self._named(unit, whole) for kind, whole in wholes.items() if whole is not None}
        return UnitState(vectors, steps.squeeze())

    def settle(self) -> None:
        """Waits for all updates."""
        self._parts.copies.settle()

    def close(self) -> None:
        self._parts.updates.close()
        for state in self._parts.states.values():
            state.close()
        self._grid.close()

    def _flat(self, unit: int, named: dict[str, Tensor]) -> Tensor:
        """[padded numel]"""
        described, shards = self.units[unit], self._grid.layout.shards
        flat = torch.zeros(described.shard_length(shards) * shards, dtype=self._blueprint.master)
        torch.cat([named[parameter.name].flatten() for parameter in described.parameters], out=flat[: described.numel])
        return flat

    def _named(self, unit: int, flat: Tensor) -> dict[str, Tensor]:
        parameters = self.units[unit].parameters
        shaped = views(flat, [parameter.shape for parameter in parameters])
        return {parameter.name: view for parameter, view in zip(parameters, shaped, strict=True)}

    def _whole(self, unit: int, kind: Kind) -> Tensor | None:
        """[padded numel], on the ranks of the first pipeline rank that uses the unit."""
        grid = self._grid
        if grid.pipeline_rank != grid.layout.users[unit][0]:
            return None
        own = self._parts.states[unit].get(kind).cpu()
        if grid.layout.shards == 1:
            return own
        whole = torch.empty(len(own) * grid.layout.shards, dtype=own.dtype)
        dist.all_gather_into_tensor(whole, own, group=grid.host_data)
        return whole

    def _brought(self, unit: int, tensor: Tensor | None, size: int, dtype: torch.dtype) -> Tensor | None:
        """From the unit's first rank, which has `tensor`, [size], to the first rank of all."""
        grid = self._grid
        source = grid.layout.world_rank(grid.layout.users[unit][0], 0)
        if grid.ranks.rank == FIRST == source:
            return tensor
        if grid.ranks.rank == source:
            assert tensor is not None, "it uses the unit"
            dist.send(tensor, FIRST, group=grid.host_world)
        elif grid.ranks.rank == FIRST:
            room = torch.empty(size, dtype=dtype)
            dist.recv(room, source, group=grid.host_world)
            return room
        return None
