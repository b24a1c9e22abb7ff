"""Makes the parts of an engine: room for states, working copies and gradients, as the layout says."""

from dataclasses import dataclass
from pathlib import Path

import torch
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.optimizer import Optimizer as OptimizerSpec
from torch import Tensor

from pseudoreal_trainer.engine.activations import StashRoom
from pseudoreal_trainer.engine.copies import Copies
from pseudoreal_trainer.engine.gradients import Buffers, Gradients
from pseudoreal_trainer.engine.messages import Messages
from pseudoreal_trainer.engine.modules import Modules
from pseudoreal_trainer.engine.ranks.grid import Grid
from pseudoreal_trainer.engine.ranks.lanes import Lanes
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.reductions import Reductions
from pseudoreal_trainer.engine.runner import Parts
from pseudoreal_trainer.engine.state.adamw import AdamW
from pseudoreal_trainer.engine.state.disk import open_disk_states
from pseudoreal_trainer.engine.state.memory import Extent, MemoryState, State, Vectors
from pseudoreal_trainer.engine.state.pinned import Allocator, Region, Slots, allocator_for
from pseudoreal_trainer.engine.state.ring import RingRoom
from pseudoreal_trainer.engine.tokens import TokenRoom
from pseudoreal_trainer.engine.updates import Updates
from pseudoreal_trainer.forecast.memory.crossing import crossing
from pseudoreal_trainer.forecast.memory.sizes import Sizes
from pseudoreal_trainer.plan.buffers import gradient_buffers
from pseudoreal_trainer.plan.units import Unit


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


@dataclass(frozen=True)
class Rooms:
    """The memory of a rank."""

    memory: Allocator
    """Allocator of the host memory that crosses the bus."""
    region: Region
    slots: Slots
    states: dict[int, State]
    resident: dict[int, Tensor]
    """Unit -> working copy that stays, [padded numel]."""
    gradients: dict[int, Tensor]
    """Unit -> whole gradient that stays, [padded numel]."""


def build_parts(blueprint: Blueprint, grid: Grid, trace: Trace) -> Parts:
    lanes, rooms = Lanes(grid.device), _rooms(blueprint, grid, trace)
    modules = Modules(blueprint.model, blueprint.units, blueprint.compute, compiled=blueprint.compiled)
    buffers = _buffers(blueprint, grid, rooms)
    gradients = Gradients(grid, modules, rooms.states, rooms.gradients, buffers, lanes, trace)
    reductions = Reductions(blueprint.optimizer, grid, blueprint.units, rooms.states, gradients, lanes, trace)
    return Parts(
        layout=grid.layout,
        grid=grid,
        memory=rooms.memory,
        region=rooms.region,
        states=rooms.states,
        modules=modules,
        copies=Copies(grid, rooms.states, rooms.resident, _slots(blueprint, grid), lanes, trace),
        gradients=gradients,
        reductions=reductions,
        updates=Updates(blueprint.optimizer, grid, rooms.states, reductions, lanes, trace),
        messages=Messages(grid, blueprint.compute, trace),
        stashes=StashRoom(rooms.memory),
        tokens=TokenRoom(lanes, grid.device, rooms.memory),
        captures=RingRoom(rooms.memory),
        lanes=lanes,
        trace=trace,
        hidden=blueprint.model.hidden_size,
        master=blueprint.master,
        compute=blueprint.compute,
    )


def _rooms(blueprint: Blueprint, grid: Grid, trace: Trace) -> Rooms:
    layout, adamw = grid.layout, AdamW()
    # Batches have no part in the region.
    sizes = Sizes(blueprint.model, blueprint.units, blueprint.compute.itemsize, blueprint.master.itemsize, 1)
    memory = allocator_for(grid.device)
    region = Region(crossing(layout, sizes, grid.pipeline_rank), memory)
    rooms = Rooms(memory, region, Slots(region.all_of("passing")), {}, {}, {})
    local = layout.local_units(grid.pipeline_rank)
    for unit in local:
        if layout.home(unit) != "Disk":
            rooms.states[unit] = _memory_state(blueprint, grid, unit, rooms, adamw)
    on_disk = {unit: _extent(blueprint, grid, unit) for unit in local if layout.home(unit) == "Disk"}
    if on_disk:
        folder, staging = blueprint.offload_directory, region.all_of("staging")
        states = open_disk_states(folder, on_disk, layout.keeps_gradient, staging, rooms.slots, adamw, trace)
        rooms.states.update(states)
    return rooms


def _extent(blueprint: Blueprint, grid: Grid, unit: int) -> Extent:
    described = blueprint.units[unit]
    shard = described.shard(grid.data_rank if grid.layout.shards > 1 else 0, grid.layout.shards)
    decayed = min(max(described.decayed - shard.start, 0), len(shard))
    return Extent(shard.start, len(shard), decayed, blueprint.master, blueprint.compute)


def _memory_state(blueprint: Blueprint, grid: Grid, unit: int, rooms: Rooms, adamw: AdamW) -> MemoryState:
    vectors = _on_host if grid.layout.home(unit) == "Host" else _on_device
    return MemoryState(_extent(blueprint, grid, unit), vectors(blueprint, grid, unit, rooms), adamw, rooms.slots)


def _on_host(blueprint: Blueprint, grid: Grid, unit: int, rooms: Rooms) -> Vectors:
    """Vectors of a unit whose home is the host. Those that cross the bus are in the region; masters and moments are
    ordinary memory."""
    master, compute = blueprint.master, blueprint.compute
    weights = rooms.region.vector("weights", unit, compute)
    masters = weights if master == compute else torch.zeros(len(weights), dtype=master)
    keeps = grid.layout.keeps_gradient(unit)
    return Vectors(masters, weights, rooms.region.vector("gradient", unit, master) if keeps else None)


def _on_device(blueprint: Blueprint, grid: Grid, unit: int, rooms: Rooms) -> Vectors:
    layout, extent = grid.layout, _extent(blueprint, grid, unit)
    own, whole = slice(extent.begin, extent.begin + extent.length), extent.length * layout.shards

    def room(length: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(length, dtype=dtype, device=grid.device)

    if layout.moves(unit):
        weights = room(extent.length, extent.compute)
    else:
        rooms.resident[unit] = room(whole, extent.compute)
        weights = rooms.resident[unit][own]
    masters = weights if extent.master == extent.compute else room(extent.length, extent.master)
    if _keeps_whole_gradient(grid, unit):
        rooms.gradients[unit] = room(whole, extent.master)
        gradient = rooms.gradients[unit][own]
    else:
        gradient = room(extent.length, extent.master)
    return Vectors(
        masters,
        weights,
        gradient,
        compute_parts=whole // extent.length if unit in rooms.resident else 1,
        gradient_parts=whole // extent.length if unit in rooms.gradients else 1,
    )


def _keeps_whole_gradient(grid: Grid, unit: int) -> bool:
    layout = grid.layout
    return not layout.moves(unit) and (layout.sharding in ("None", "Optimizer") or layout.data == 1)


def _slots(blueprint: Blueprint, grid: Grid) -> list[Tensor]:
    layout = grid.layout
    moving = [unit for unit in layout.local_units(grid.pipeline_rank) if layout.moves(unit)]
    count = min(layout.window, len(moving))
    size = max((_padded(blueprint, grid, unit) for unit in moving), default=0)
    return [torch.zeros(size, dtype=blueprint.compute, device=grid.device) for _ in range(count)]


def _buffers(blueprint: Blueprint, grid: Grid, rooms: Rooms) -> Buffers:
    sharing = [unit for unit in grid.layout.local_units(grid.pipeline_rank) if unit not in rooms.gradients]
    size = max((_padded(blueprint, grid, unit) for unit in sharing), default=0)
    return Buffers(size, gradient_buffers(grid.layout, grid.pipeline_rank), blueprint.master, grid.device)


def _padded(blueprint: Blueprint, grid: Grid, unit: int) -> int:
    return blueprint.units[unit].shard_length(grid.layout.shards) * grid.layout.shards
