"""Gives every layer that no longer shares a block a block of its own, without copying: the new checkpoint is a manifest
that says from which bytes of the old one each block is read."""

from collections import Counter

import structlog
from pseudoreal_api.messages import TerminationMessage
from pseudoreal_api.phase_spec import Sharing
from pseudoreal_api.resolved import DelinkConfig

from pseudoreal_trainer.checkpoint.fence import Fence
from pseudoreal_trainer.checkpoint.manifest import Link, Manifest, OptimizerState, Updates
from pseudoreal_trainer.checkpoint.place import place_of
from pseudoreal_trainer.checkpoint.store import CheckpointStore, CorruptCheckpoint
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.sharing import blocks_of_layers, sources

log = structlog.get_logger()


def delink(config: DelinkConfig) -> TerminationMessage:
    """Commits the first checkpoint of `config.phase`; when it is already there, only verifies it.

    Raises TrainingError when the phase before has no complete checkpoint, or the source is corrupt.
    """
    store = CheckpointStore(place_of(config.storage), config.job.uid)
    source = store.newest(config.from_phase, complete=True)
    if source is None:
        raise TrainingError(
            f"phase {config.from_phase} has no complete checkpoint in {store.folder}; it must finish before"
            f" {config.phase} can be delinked from it"
        )
    Fence(store.work_directory, config.attempt).claim()
    manifest = delinked(source.manifest, config.phase, config.to_sharing, config.optimizer_state)
    manifest = manifest.model_copy(update={"attempt": config.attempt})
    manifest = _already_there(store, manifest) or _committed(store, manifest)
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


def delinked(source: Manifest, phase: str, sharing: Sharing, optimizer_state: OptimizerState) -> Manifest:
    """The manifest of the same weights with the blocks of the next phase. Pure.

    Raises ValueError when the new sharing does not refine the old one.
    """
    layers = source.model.layers
    before, after = blocks_of_layers(source.sharing, layers), blocks_of_layers(sharing, layers)
    link = _link(source, before, after, optimizer_state)
    return source.model_copy(
        update={
            "phase": phase,
            "phase_index": source.phase_index + 1,
            "sharing": sharing,
            "start_validation_loss": None,
            "validation_loss": None,
            "phase_complete": False,
            "delinked": True,
            "parent": source.name,
            "optimizer_state": optimizer_state,
            "updates": _updates(source, reset=before != after and optimizer_state == "reset"),
            "link": link,
        }
    )


def _link(source: Manifest, before: tuple[int, ...], after: tuple[int, ...], optimizer_state: OptimizerState) -> Link:
    """The gradient of a block that n layers used is the sum of n; of a layer's own block it is one of them, and the
    second moment is of its square."""
    old = source.link or Link(
        folder=source.name,
        blocks=list(range(source.sharing.blocks)),
        first_moment_divisor=1,
        second_moment_divisor=1,
    )
    uses = _uses_per_block(before) / _uses_per_block(after)
    first, second = {"copy": (1.0, 1.0), "scale": (uses, uses**2), "reset": (0.0, 0.0)}[
        "copy" if before == after else optimizer_state
    ]
    return Link(
        folder=old.folder,
        blocks=[old.blocks[block] for block in sources(before, after)],
        first_moment_divisor=old.first_moment_divisor * first,
        second_moment_divisor=old.second_moment_divisor * second,
    )


def _uses_per_block(blocks: tuple[int, ...]) -> float:
    """Every block has the same number: blocks divide layers."""
    return len(blocks) / len(Counter(blocks))


def _updates(source: Manifest, *, reset: bool) -> Updates:
    return Updates(others=source.updates.others, blocks=0 if reset else source.updates.blocks)


def _committed(store: CheckpointStore, manifest: Manifest) -> Manifest:
    store.begin(manifest)
    store.commit(manifest)
    return manifest


def _already_there(store: CheckpointStore, target: Manifest) -> Manifest | None:
    for manifest in store.committed(target.phase):
        if manifest.name == target.name and _sound(store, manifest):
            return manifest
    return None


def _sound(store: CheckpointStore, manifest: Manifest) -> bool:
    try:
        store.verify(manifest)
    except CorruptCheckpoint as error:
        log.warning("checkpoint_corrupt", checkpoint=manifest.name, error=str(error))
        return False
    return True
