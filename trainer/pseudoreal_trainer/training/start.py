"""Start of a phase: compare the corpus, create the engine, and fill the engine with fresh, imported or checkpointed
weights.

A checkpoint may have been saved in any layout.
"""

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from numpy.typing import NDArray
from pseudoreal_api.resolved.config import PhaseConfig
from torch import Tensor

from pseudoreal_trainer.checkpoint.manifest import Ending
from pseudoreal_trainer.checkpoint.origin import Continued, FreshStart, Origin
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.slices import read_in_slice
from pseudoreal_trainer.convert.weights import Weights, open_weights
from pseudoreal_trainer.data.corpus import CorpusIdentity
from pseudoreal_trainer.engine.blueprint import Blueprint
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.engine_state import UnitState
from pseudoreal_trainer.engine.ranks.process_groups import create_process_groups
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.state.blocks import moment_dtype
from pseudoreal_trainer.errors import InvalidJobError, TrainingError
from pseudoreal_trainer.model.initialization import initial_weights
from pseudoreal_trainer.model.reference import Transformer, load_into
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.parts import Part, parts_of
from pseudoreal_trainer.plan.units import KINDS, Kind, Unit, units_of
from pseudoreal_trainer.storage.hub import weights_folder
from pseudoreal_trainer.training.progress import Progress

log = structlog.get_logger()


def agree_on_corpus(identity: CorpusIdentity, ranks: Ranks) -> None:
    """Check that all ranks read the same corpus. Collective: every rank calls this.

    Raises TrainingError if a rank reads another corpus than rank 0.
    """
    differs = torch.zeros(ranks.world, dtype=torch.int64, device=ranks.device)
    differs[ranks.rank] = int(ranks.digest_from_first(identity.sha256) != identity.sha256)
    others: list[int] = ranks.sum_(differs).nonzero().flatten().tolist()
    if others:
        raise TrainingError(
            f"rank {others[0]} reads another corpus than rank 0 (rank {ranks.rank} reads {identity}); all pods of a"
            " phase must see the same files: look at spec.data.volume, and whether somebody writes there",
            suspect=None if ranks.rank in others else others[0],
        )


def check_corpus(identity: CorpusIdentity, origin: Origin) -> None:
    """Compare the corpus with the corpus of the origin's checkpoint.

    Raises InvalidJobError if the two differ within one job: every sample would change, and training would use text of
    the validation part. After `continueFrom` another job, a different corpus is only logged.
    """
    if isinstance(origin, FreshStart):
        return
    start = origin.checkpoint.manifest
    before = start.corpus
    if identity.is_same_text(before):
        return
    if isinstance(origin, Continued):
        log.warning("continues_with_another_corpus", checkpoint=start.name, now=str(identity), before=str(before))
        return
    raise InvalidJobError(
        f"the corpus is not the one that checkpoint {start.name} was trained on: it has {identity}, and had"
        f" {before}; restore the files, or train on the new ones in a new job, whose spec.checkpoint.continueFrom"
        " may name this one's folder"
    )


_REMEDY = (
    "take the trainer image whose tag ends in -compiler (docker build --target trainer-compiler), or set compile.mode"
    " None in the phase"
)
_SEED_BITS = 32
"""Bits of the largest seed of a job."""
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def open_imported(config: PhaseConfig, origin: Origin, *, checks: bool) -> Weights | None:
    """Open the phase's initial weights from another program; None if the job has no such weights, or has a checkpoint.

    The rank with `checks` verifies all weights; the other ranks verify only their own reads. Raises InvalidJobError if
    the weights do not fit the model.
    """
    start = config.start_from
    if start is None or start.hugging_face is None or not isinstance(origin, FreshStart):
        return None
    weights = open_weights(weights_folder(start.hugging_face.path), config.model, config.sharing, start.blocks)
    if checks:
        weights.check()
        log.info("weights_imported", folder=str(weights.folder), model_type=weights.config["model_type"])
    return weights


def first_progress(config: PhaseConfig, origin: Origin, imported: Weights | None = None) -> Progress:
    """Return the progress before this execution's first step."""
    if isinstance(origin, FreshStart):
        return Progress(imported=None if imported is None else imported.config)
    progress = Progress.saved_in(origin.checkpoint.manifest)
    if not isinstance(origin, Continued):
        return progress
    # The other job may have had other sources, another mixture and another batch.
    progress = replace(progress, mixture_begin=None)
    # The last phase of the other job may be trained further, so its ending is cleared; an earlier phase stays ended.
    return replace(progress, ending=Ending()) if config.phase_steps == config.total_steps else progress


def uses_compiler(config: PhaseConfig, ranks: Ranks) -> bool:
    return config.compile.mode == "Blocks" and ranks.device.type != "cpu"


def require_compiler() -> None:
    """Raise InvalidJobError if this machine cannot compile for a GPU. Otherwise the first step would raise the error.

    Besides torch, Triton needs a C compiler and Python's headers.
    """
    chosen = os.environ.get("CC")
    if chosen is not None and shutil.which(chosen) is None:
        raise InvalidJobError(
            f"compile.mode Blocks needs a C compiler, but CC names {chosen}, which is not there; {_REMEDY}"
        )
    if chosen is None and shutil.which("gcc") is None and shutil.which("clang") is None:
        raise InvalidJobError(f"compile.mode Blocks needs a C compiler, but there is neither gcc nor clang; {_REMEDY}")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise InvalidJobError(f"compile.mode Blocks needs Python's headers, but {header} is not there; {_REMEDY}")


@contextmanager
def open_engine(
    config: PhaseConfig, layout: Layout, ranks: Ranks, end_of_document: int | None = None
) -> Iterator[Engine]:
    """Create this rank's engine for a context, and close the engine after the context. Collective: every rank calls
    this.

    The token `end_of_document` ends documents, and attention stays within them; None: attention spans whole sequences.
    Raises TrainingError if the state does not fit into its home.
    """
    if config.precision.kernels == "Deterministic":
        use_deterministic_kernels()
    master = torch.float64 if config.precision.compute == "float64" else torch.float32
    blueprint = Blueprint(
        model=config.model,
        optimizer=config.optimizer,
        units=units_of(config.model, config.sharing),
        master=master,
        moments=moment_dtype(config.optimizer.moments, master),
        gradients=torch.bfloat16 if config.precision.gradients == "BFloat16" else master,
        seed=config.data.seed,
        compute=_DTYPES[config.precision.compute],
        compiled=uses_compiler(config, ranks),
        offload_directory=Path(config.offload_directory),
        end_of_document=end_of_document,
        products=config.precision.products,
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


def use_deterministic_kernels() -> None:
    """Let this process use only deterministic kernels, which give the same result in each run. An operation without
    such a kernel raises RuntimeError with its name. On a CPU this changes nothing."""
    torch.use_deterministic_algorithms(True)
    # No kernel reads memory before it is written: torch's fill of new tensors would only cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def fill(engine: Engine, config: PhaseConfig, origin: Origin, imported: Weights | None = None) -> None:
    """Load this rank's shard of each unit's state into the unit's home. Each rank reads only its shard.

    `imported`: weights of another program for a fresh start; None: random weights.
    """
    for index, unit in enumerate(engine.units):
        if engine.state.has(index):
            extent = engine.state.shard_range(index)
            if not isinstance(origin, FreshStart):
                state = _load_state(unit, extent, origin.checkpoint)
                if config.noise is not None and origin.checkpoint.manifest.link is not None:
                    noise = _noise(engine, config, index, origin.checkpoint)
                    state.vectors["weights"] += float(config.noise) * noise
                engine.state.put(index, state)
            elif imported is not None:
                engine.state.put(index, _import_state(unit, extent, imported, engine.blueprint.master))
            else:
                engine.state.put(index, _fresh_state(engine, config, index, extent))


def load_weights(model: Transformer, checkpoint: Reader) -> None:
    load_into(model, {name: torch.from_numpy(array) for name, array in checkpoint.whole().items()})


def _fresh_state(engine: Engine, config: PhaseConfig, index: int, extent: range) -> UnitState:
    return UnitState.fresh(_draw(engine, config, index, config.data.seed), extent)


def _draw(engine: Engine, config: PhaseConfig, index: int, seed: int) -> dict[str, Tensor]:
    """Return parameter -> freshly drawn weights of a unit of this rank."""
    number = engine.groups.layout.unit_of_model(index)
    return initial_weights(engine.units[index], number, config.model, seed, engine.blueprint.master)


def _noise(engine: Engine, config: PhaseConfig, index: int, start: Reader) -> Tensor:
    """Return freshly drawn weights for this rank's shard of a unit; zero outside of copies, and outside of matrices.

    The seed is not that of the initial weights: these may be a part of what is copied.
    """
    unit, extent = engine.units[index], engine.state.shard_range(index)
    copies = {one.name: start.first_copy(one.name) for one in unit.parameters if one.is_matrix}
    if all(one.rows.stop <= copies.get(one.name, one.rows.stop) for one in unit.parameters):
        return torch.zeros(len(extent), dtype=engine.blueprint.master)
    drawn = _draw(engine, config, index, config.data.seed + (config.index << _SEED_BITS))
    for one in unit.parameters:
        drawn[one.name][: max(0, copies.get(one.name, one.rows.stop) - one.rows.start)] = 0
    return UnitState.fresh(drawn, extent).vectors["weights"]


def _load_state(unit: Unit, extent: range, start: Reader) -> UnitState:
    return UnitState(
        {kind: _load_vector(unit, extent, start, kind) for kind in KINDS}, start.updates(unit.parameters[0].name)
    )


def _import_state(unit: Unit, extent: range, weights: Weights, dtype: torch.dtype) -> UnitState:
    name = str(dtype).removeprefix("torch.")

    def read(part: Part) -> NDArray[Any]:
        if part.column_slices == 1:
            return weights.read(part.name, part.begin, part.end, name)
        rows = partial(weights.read, part.name, dtype=name)
        return read_in_slice(rows, part.shape, part.column_slices, part.begin, part.end)

    zeros = torch.zeros(len(extent), dtype=dtype)
    return UnitState(
        {kind: _read_parts(unit, extent, dtype, read) if kind == "weights" else zeros for kind in KINDS}, 0
    )


def _load_vector(unit: Unit, extent: range, start: Reader, kind: Kind) -> Tensor:
    """Return this rank's shard of one state vector of a unit, [length of the extent]."""

    def read(part: Part) -> NDArray[Any]:
        return start.read(part.name, kind, part.begin, part.end, part.column_slices)

    return _read_parts(unit, extent, getattr(torch, start.dtype), read)


def _read_parts(unit: Unit, extent: range, dtype: torch.dtype, read: Callable[[Part], NDArray[Any]]) -> Tensor:
    """Read the tensor parts of an extent and return them joined, [length of the extent]; zeros after the end of the
    unit."""
    found = torch.zeros(len(extent), dtype=dtype)
    for part in parts_of(unit, extent):
        offset, array = part.offset - extent.start, read(part)
        found[offset : offset + len(array)] = torch.from_numpy(array)
    return found
