"""The start of a phase: it makes the engine and fills it with fresh weights or those of a checkpoint, in whatever
layout that was saved."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from pseudoreal_api.resolved.config import PhaseConfig
from torch import Tensor

from pseudoreal_trainer.checkpoint.manifest import Ending
from pseudoreal_trainer.checkpoint.origin import Anew, Continued, Origin
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.engine.engine import Blueprint, Engine, UnitState
from pseudoreal_trainer.engine.ranks.mesh import open_mesh
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.forecast.memory.sizes import Device
from pseudoreal_trainer.model.initial import initial_weights
from pseudoreal_trainer.model.transformer import Transformer
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.parts import parts_of
from pseudoreal_trainer.plan.units import KINDS, Kind, Unit, units_of
from pseudoreal_trainer.training.progress import Progress

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def first_progress(config: PhaseConfig, origin: Origin) -> Progress:
    """How far the phase is before this execution's first step."""
    if isinstance(origin, Anew):
        return Progress()
    progress = Progress.saved_in(origin.checkpoint.manifest)
    if not isinstance(origin, Continued):
        return progress
    # The sources, the mixture and the batch of another job may be others.
    progress = replace(progress, mixture_begin=None)
    # The last phase of another job may be trained longer; an earlier one is done.
    return replace(progress, ending=Ending()) if config.phase_steps == config.total_steps else progress


def device_kind(ranks: Ranks) -> Device:
    return "cuda" if ranks.device.type == "cuda" else "cpu"


def compiles(config: PhaseConfig, ranks: Ranks) -> bool:
    return config.compile.mode == "Blocks" and ranks.device.type == "cuda"


@contextmanager
def open_engine(config: PhaseConfig, layout: Layout, ranks: Ranks) -> Iterator[Engine]:
    """Makes the engine of this rank, and closes it at the end. Every rank calls this. Raises TrainingError when the
    state does not fit into its home."""
    blueprint = Blueprint(
        model=config.model,
        optimizer=config.optimizer,
        units=units_of(config.model, config.sharing),
        master=torch.float64 if config.precision.compute == "float64" else torch.float32,
        compute=_DTYPES[config.precision.compute],
        compiled=compiles(config, ranks),
        offload_directory=Path(config.offload_directory),
    )
    folder = None if config.trace_directory is None else Path(config.trace_directory) / config.phase
    trace = Trace(ranks.rank, folder)
    engine = Engine(blueprint, open_mesh(layout, ranks), trace)
    try:
        yield engine
    except BaseException:
        # Of several ranks one that fails ends at once: its other threads may be waiting for those ranks.
        if ranks.world == 1:
            engine.close()
        raise
    else:
        engine.close()
    finally:
        trace.close()


def fill(engine: Engine, config: PhaseConfig, origin: Origin) -> None:
    """Puts this rank's part of the state in its homes; each rank reads only what it holds."""
    for index, unit in enumerate(engine.units):
        if engine.has(index):
            extent = engine.extent(index)
            if isinstance(origin, Anew):
                engine.put(index, _fresh(engine, config, index, extent))
            else:
                engine.put(index, _loaded(unit, extent, origin.checkpoint))


def load_weights(model: Transformer, checkpoint: Reader) -> None:
    model.load_state_dict({name: torch.from_numpy(array) for name, array in checkpoint.whole().items()})


def _fresh(engine: Engine, config: PhaseConfig, index: int, extent: range) -> UnitState:
    unit = engine.units[index]
    weights = initial_weights(unit, index, config.model, config.data.seed, engine.master_dtype)
    return UnitState.fresh(weights, extent)


def _loaded(unit: Unit, extent: range, start: Reader) -> UnitState:
    return UnitState(
        {kind: _vector(unit, extent, start, kind) for kind in KINDS}, start.updates(unit.parameters[0].name)
    )


def _vector(unit: Unit, extent: range, start: Reader, kind: Kind) -> Tensor:
    """One vector of a unit's state, [length of the extent]; zeros behind the unit's end."""
    parts = parts_of(unit, extent)
    read: list[NDArray[Any]] = [start.read(part.name, kind, part.begin, part.end) for part in parts]
    found = torch.zeros(len(extent), dtype=getattr(torch, start.dtype))
    for part, array in zip(parts, read, strict=True):
        offset = part.offset - extent.start
        found[offset : offset + len(array)] = torch.from_numpy(array)
    return found
