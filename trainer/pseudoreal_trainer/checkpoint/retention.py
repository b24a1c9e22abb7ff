"""Which checkpoints the policy does not keep. Pure."""

from collections.abc import Collection, Sequence

from pseudoreal_trainer.checkpoint.manifest import Manifest


def removable(
    committed: Sequence[Manifest], keep_last: int, keep_every: int | None, verified: Collection[str]
) -> list[Manifest]:
    """The checkpoints to remove among `committed`, which are ordered from the oldest to the newest.

    Kept are the ends of phases; of the others, the newest `keep_last` and those of steps that `keep_every` divides;
    those that `verified` says are sound; and those that another one that is kept links to.
    """
    inner = [manifest for manifest in committed if not manifest.is_boundary]
    kept = {manifest.name for manifest in committed if manifest.is_boundary}
    kept |= {manifest.name for manifest in inner[-keep_last:]}
    kept |= {manifest.name for manifest in inner if keep_every and manifest.step % keep_every == 0}
    kept |= {manifest.name for manifest in committed if manifest.name in verified}
    kept |= {manifest.data_folder for manifest in committed if manifest.name in kept}
    return [manifest for manifest in committed if manifest.name not in kept]
