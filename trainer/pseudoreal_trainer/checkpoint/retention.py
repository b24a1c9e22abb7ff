"""Which checkpoints the policy does not keep. Pure."""

from collections.abc import Collection, Sequence

from pseudoreal_trainer.checkpoint.manifest import Head


def removable(
    committed: Sequence[Head], keep_last: int, keep_every: int | None, verified: Collection[str]
) -> list[Head]:
    """The checkpoints to remove among `committed`, which are ordered from the oldest to the newest.

    Kept are the ends of phases; of the others, the newest `keep_last` and those of steps that `keep_every` divides;
    those that `verified` says are sound; and those that another one that is kept links to.
    """
    inner = [head for head in committed if not head.is_boundary]
    kept = {head.name for head in committed if head.is_boundary}
    kept |= {head.name for head in inner[-keep_last:]}
    kept |= {head.name for head in inner if keep_every and head.step % keep_every == 0}
    kept |= {head.name for head in committed if head.name in verified}
    kept |= {head.data_folder for head in committed if head.name in kept}
    return [head for head in committed if head.name not in kept]
