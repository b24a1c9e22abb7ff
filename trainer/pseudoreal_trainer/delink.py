"""Gives every layer that no longer shares a block a copy of the block that it used. Copies bytes; needs no torch."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray
from pseudoreal_api.messages import TerminationMessage
from pseudoreal_api.resolved import DelinkConfig

from pseudoreal_trainer.checkpoint import (
    FIRST_MOMENT,
    SECOND_MOMENT,
    STEP,
    Arrays,
    Checkpoint,
    CheckpointStore,
    CorruptCheckpoint,
)
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.fence import Fence
from pseudoreal_trainer.manifest import Manifest
from pseudoreal_trainer.sharing import blocks_of_layers, sources

log = structlog.get_logger()


def delink(config: DelinkConfig) -> TerminationMessage:
    """Commits the first checkpoint of `config.phase`; when it is already there, only verifies it.

    Raises TrainingError when the phase before has no complete checkpoint, or the source is corrupt.
    """
    store = CheckpointStore(Path(config.work_directory), config.job.uid)
    source = store.load_newest(config.from_phase, complete=True)
    if source is None:
        raise TrainingError(
            f"phase {config.from_phase} has no complete checkpoint in {store.folder}; it must finish before"
            f" {config.phase} can be delinked from it"
        )
    Fence(Path(config.work_directory), config.attempt).claim()
    target = delinked(source, config)
    manifest = _already_there(store, target) or store.save(target)
    log.info("delinked", checkpoint=manifest.name, parent=manifest.parent, blocks=manifest.sharing.blocks)
    return TerminationMessage(
        outcome="Succeeded",
        phase=config.phase,
        attempt=config.attempt,
        step=manifest.step,
        tokens=manifest.tokens,
        loss=manifest.loss,
        checkpoint=manifest.name,
        digest=store.digest(manifest),
    )


def delinked(source: Checkpoint, config: DelinkConfig) -> Checkpoint:
    """The same function of its input, with the blocks of the next phase. Pure."""
    manifest = source.manifest.model_copy(
        update={
            "attempt": config.attempt,
            "phase": config.phase,
            "phase_index": source.manifest.phase_index + 1,
            "sharing": config.to_sharing,
            "start_validation_loss": None,
            "validation_loss": None,
            "phase_complete": False,
            "delinked": True,
            "parent": source.manifest.name,
            "files": {},
        }
    )
    before = blocks_of_layers(config.from_sharing, config.layers)
    after = blocks_of_layers(config.to_sharing, config.layers)
    block_sources = sources(before, after)
    optimizer = _copied(source.optimizer, block_sources)
    if before != after and config.optimizer_state != "copy":
        uses = [Counter(before)[old] / Counter(after)[new] for new, old in enumerate(block_sources)]
        optimizer = {name: _moment(name, array, uses, config) for name, array in optimizer.items()}
    return Checkpoint(manifest, _copied(source.model, block_sources), optimizer)


def _already_there(store: CheckpointStore, target: Checkpoint) -> Manifest | None:
    for manifest in store.committed(target.manifest.phase):
        if manifest.name == target.manifest.name and _sound(store, manifest):
            return manifest
    return None


def _sound(store: CheckpointStore, manifest: Manifest) -> bool:
    try:
        store.load(manifest)
    except CorruptCheckpoint as error:
        log.warning("checkpoint_corrupt", checkpoint=manifest.name, error=str(error))
        return False
    return True


def _copied(arrays: Arrays, block_sources: tuple[int, ...]) -> Arrays:
    """New block b takes every array `blocks.<block_sources[b]>.*`; the rest stays."""
    out = {name: array for name, array in arrays.items() if not name.startswith("blocks.")}
    for new, old in enumerate(block_sources):
        prefix = f"blocks.{old}."
        inside = [name for name in arrays if name.startswith(prefix)]
        out |= {f"blocks.{new}.{name.removeprefix(prefix)}": arrays[name] for name in inside}
    return out


def _moment(name: str, array: NDArray[Any], uses: list[float], config: DelinkConfig) -> NDArray[Any]:
    """The gradient of a block that n layers used is the sum of n; of a layer's own block it is one of them."""
    if not name.startswith("blocks."):
        return array
    if config.optimizer_state == "reset":
        return np.zeros_like(array)
    n, kind = uses[int(name.split(".")[1])], name.rsplit(".", 1)[1]
    powers = {FIRST_MOMENT: 1, SECOND_MOMENT: 2, STEP: 0}
    return np.asarray(array / n ** powers[kind], dtype=array.dtype)
