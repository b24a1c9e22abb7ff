"""Gives every layer that no longer shares a block a block of its own, without copying: the new checkpoint is a manifest
that says from which bytes of the old one each block is read."""

from dataclasses import dataclass

import structlog
from pseudoreal_api.resolved.config import DelinkConfig
from pseudoreal_api.spec.phase import OptimizerState, Sharing
from pseudoreal_api.wire.messages import TerminationMessage

from pseudoreal_trainer.checkpoint.fence import Fence
from pseudoreal_trainer.checkpoint.manifest import Ending, Link, Manifest, Updates
from pseudoreal_trainer.checkpoint.store import CheckpointStore, CorruptCheckpoint, store_of
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.plan.sharing import blocks_of_layers, sources
from pseudoreal_trainer.plan.units import block_name, block_of

log = structlog.get_logger()


def delink(config: DelinkConfig) -> TerminationMessage:
    """Commits the first checkpoint of `config.phase`; when it is already there, only verifies it.

    Raises TrainingError when the phase before has no complete checkpoint, or the source is corrupt.
    """
    store = store_of(config)
    source = store.newest(config.from_phase, complete=True)
    if source is None:
        raise TrainingError(
            f"phase {config.from_phase} has no complete checkpoint in {store.folder}; it must finish before"
            f" {config.phase} can be delinked from it"
        )
    Fence(store.work_directory, config.execution).claim()
    manifest = delinked(source.manifest, config.phase, config.to_sharing, config.optimizer_state)
    manifest = manifest.revised(execution=config.execution)
    manifest = _already_there(store, manifest) or _committed(store, manifest)
    log.info("delinked", checkpoint=manifest.name, parent=manifest.parent, blocks=manifest.sharing.blocks)
    return TerminationMessage(
        outcome="Succeeded",
        phase=config.phase,
        execution=config.execution,
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
    if before == after:
        optimizer_state = "Copy"
    blocks = sources(before, after)
    link = _link(source, blocks, _Divisors.of(source, sharing, optimizer_state))
    return source.revised(
        phase=phase,
        phase_index=source.phase_index + 1,
        phase_begin=source.step,
        sharing=sharing,
        start_validation_loss=None,
        validation_loss=None,
        phase_complete=False,
        ending=Ending(),
        measurement=None,
        delinked=True,
        parent=source.name,
        optimizer_state=optimizer_state,
        updates=_updates(source.updates, blocks, reset=optimizer_state == "Reset"),
        link=link,
    )


@dataclass(frozen=True)
class _Divisors:
    """What the moments of blocks are divided by."""

    first: float
    second: float
    measured: dict[str, float]
    """Divisors of the second moments of single tensors, by their names in the source."""

    @classmethod
    def of(cls, source: Manifest, sharing: Sharing, optimizer_state: OptimizerState) -> "_Divisors":
        """The divisors. The gradient of a block is the sum of those of the n layers that used it; a layer's own block
        has one of them, and the second moment is that of its square."""
        uses = sharing.blocks / source.sharing.blocks
        match optimizer_state:
            case "Copy":
                return cls(1, 1, {})
            case "Reset":
                return cls(0, 0, {})
            case "Scale":
                return cls(uses, uses**2, {})
            case "Measured":
                return cls(uses, uses**2, _measured(source, sharing))


def _measured(source: Manifest, sharing: Sharing) -> dict[str, float]:
    """Tensor of a block -> how much larger the square of its gradient was than that of a block of the next phase."""
    if source.updates.blocks == 0:
        return {}
    found = source.measurement
    if found is None or found.next_sharing != sharing:
        measured = "nothing" if found is None else f"the gradients of {_described(found.next_sharing)}"
        raise TrainingError(
            f"optimizerState Measured: checkpoint {source.name} measured {measured}, and not the gradients of"
            f" {_described(sharing)}; train the end of phase {source.phase} with optimizerState Measured, or delink"
            " with Scale"
        )
    # Without any gradient there is no second moment either, and the divisor for all others does.
    return {name: found.shared[name] / single for name, single in found.single.items() if single > 0}


def _described(sharing: Sharing) -> str:
    return f"{sharing.blocks} blocks ({sharing.pattern})"


def _link(source: Manifest, blocks: tuple[int, ...], divisors: _Divisors) -> Link:
    """`blocks`: entry b is the block of the source that block b is read from."""
    assert source.link is None or not divisors.measured, "what was trained and measured has files of its own"
    old = source.link or Link(
        folder=source.name,
        blocks=list(range(source.sharing.blocks)),
        first_moment_divisor=1,
        second_moment_divisor=1,
    )
    return Link(
        folder=old.folder,
        blocks=[old.blocks[block] for block in blocks],
        first_moment_divisor=old.first_moment_divisor * divisors.first,
        second_moment_divisor=old.second_moment_divisor * divisors.second,
        second_moment_divisors=divisors.measured
        or {name: divisor * divisors.second for name, divisor in old.second_moment_divisors.items()},
    )


def _updates(source: Updates, blocks: tuple[int, ...], *, reset: bool) -> Updates:
    """`blocks`: entry b is the block of the source that block b is read from."""
    left_out = {unit: count for unit, count in source.left_out.items() if block_of(unit) is None}
    if reset:
        return Updates(others=source.others, blocks=0, left_out=left_out)
    counts = {block_name(block): source.left_out.get(block_name(old), 0) for block, old in enumerate(blocks)}
    left_out |= {unit: count for unit, count in counts.items() if count}
    return Updates(others=source.others, blocks=source.blocks, left_out=left_out)


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
