"""Start of a phase: create the engine and fill it with fresh, imported or checkpointed weights.

A checkpoint may have been saved in any layout.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
import torch
from numpy.typing import NDArray
from pseudoreal_api.resolved.config import PhaseConfig
from torch import Tensor

from pseudoreal_trainer.checkpoint.manifest import Ending
from pseudoreal_trainer.checkpoint.origin import Anew, Continued, Origin
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.convert.weights import Weights, open_weights
from pseudoreal_trainer.engine.engine import Blueprint, Engine, UnitState
from pseudoreal_trainer.engine.ranks.process_groups import create_process_groups
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.model.initial import initial_weights
from pseudoreal_trainer.model.transformer import Transformer, load_into
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.parts import Part, parts_of
from pseudoreal_trainer.plan.sizes import Device
from pseudoreal_trainer.plan.units import KINDS, Kind, Unit, units_of
from pseudoreal_trainer.storage.path import storage_path
from pseudoreal_trainer.training.progress import Progress

log = structlog.get_logger()

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def open_imported(config: PhaseConfig, origin: Origin, *, checks: bool) -> Weights | None:
    """Open the phase's initial weights from another program; None if there are none, or a checkpoint exists.

    The rank with `checks` verifies all of them; the other ranks verify only their own reads. Raises InvalidJobError if
    they do not fit the model.
    """
    start = config.start_from
    if start is None or start.hugging_face is None or not isinstance(origin, Anew):
        return None
    weights = open_weights(storage_path(start.hugging_face.path), config.model, config.sharing, start.blocks)
    if checks:
        weights.check()
        log.info("weights_imported", folder=str(weights.folder), model_type=weights.config["model_type"])
    return weights


def first_progress(config: PhaseConfig, origin: Origin, imported: Weights | None = None) -> Progress:
    """Return the progress before this execution's first step."""
    if isinstance(origin, Anew):
        return Progress(imported=None if imported is None else imported.config)
    progress = Progress.saved_in(origin.checkpoint.manifest)
    if not isinstance(origin, Continued):
        return progress
    # The other job may have had other sources, another mixture and another batch.
    progress = replace(progress, mixture_begin=None)
    # The last phase of the other job may be trained further, so its ending is cleared; an earlier phase stays ended.
    return replace(progress, ending=Ending()) if config.phase_steps == config.total_steps else progress


def device_kind(ranks: Ranks) -> Device:
    return "cuda" if ranks.device.type == "cuda" else "cpu"


def compiles(config: PhaseConfig, ranks: Ranks) -> bool:
    return config.compile.mode == "Blocks" and ranks.device.type == "cuda"


@contextmanager
def open_engine(
    config: PhaseConfig, layout: Layout, ranks: Ranks, end_of_document: int | None = None
) -> Iterator[Engine]:
    """Create this rank's engine and close it at the end. Every rank calls this.

    Attention stays within documents ended by the token `end_of_document`; None: attention spans whole sequences. Raises
    TrainingError if the state does not fit into its home.
    """
    blueprint = Blueprint(
        model=config.model,
        optimizer=config.optimizer,
        units=units_of(config.model, config.sharing),
        master=torch.float64 if config.precision.compute == "float64" else torch.float32,
        compute=_DTYPES[config.precision.compute],
        compiled=compiles(config, ranks),
        offload_directory=Path(config.offload_directory),
        end_of_document=end_of_document,
    )
    folder = None if config.trace_directory is None else Path(config.trace_directory) / config.phase
    trace = Trace(ranks.rank, folder)
    engine = Engine(blueprint, create_process_groups(layout, ranks), trace)
    try:
        yield engine
    except BaseException:
        # Among several ranks, a failing rank does not close: its other threads may be waiting for the other ranks.
        if ranks.world == 1:
            engine.close()
        raise
    else:
        engine.close()
    finally:
        trace.close()


def fill(engine: Engine, config: PhaseConfig, origin: Origin, imported: Weights | None = None) -> None:
    """Load this rank's shard of the state into its homes; each rank reads only its shard.

    `imported` are weights of another program for a fresh start.
    """
    for index, unit in enumerate(engine.units):
        if engine.has(index):
            extent = engine.extent(index)
            if not isinstance(origin, Anew):
                engine.put(index, _loaded(unit, extent, origin.checkpoint))
            elif imported is not None:
                engine.put(index, _imported(unit, extent, imported, engine.master_dtype))
            else:
                engine.put(index, _fresh(engine, config, index, extent))


def load_weights(model: Transformer, checkpoint: Reader) -> None:
    load_into(model, {name: torch.from_numpy(array) for name, array in checkpoint.whole().items()})


def _fresh(engine: Engine, config: PhaseConfig, index: int, extent: range) -> UnitState:
    unit = engine.units[index]
    number = engine.groups.layout.unit_of_model(index)
    weights = initial_weights(unit, number, config.model, config.data.seed, engine.master_dtype)
    return UnitState.fresh(weights, extent)


def _loaded(unit: Unit, extent: range, start: Reader) -> UnitState:
    return UnitState(
        {kind: _vector(unit, extent, start, kind) for kind in KINDS}, start.updates(unit.parameters[0].name)
    )


def _imported(unit: Unit, extent: range, weights: Weights, dtype: torch.dtype) -> UnitState:
    name = str(dtype).removeprefix("torch.")

    def read(part: Part) -> NDArray[Any]:
        return weights.read(part.name, part.begin, part.end, name)

    zeros = torch.zeros(len(extent), dtype=dtype)
    return UnitState({kind: _joined(unit, extent, dtype, read) if kind == "weights" else zeros for kind in KINDS}, 0)


def _vector(unit: Unit, extent: range, start: Reader, kind: Kind) -> Tensor:
    """Return this rank's shard of one state vector of a unit, [length of the extent]."""

    def read(part: Part) -> NDArray[Any]:
        return start.read(part.name, kind, part.begin, part.end)

    return _joined(unit, extent, getattr(torch, start.dtype), read)


def _joined(unit: Unit, extent: range, dtype: torch.dtype, read: Callable[[Part], NDArray[Any]]) -> Tensor:
    """Return the tensor parts of an extent, read and joined, [length of the extent]; zeros after the end of the
    unit."""
    found = torch.zeros(len(extent), dtype=dtype)
    for part in parts_of(unit, extent):
        offset, array = part.offset - extent.start, read(part)
        found[offset : offset + len(array)] = torch.from_numpy(array)
    return found
