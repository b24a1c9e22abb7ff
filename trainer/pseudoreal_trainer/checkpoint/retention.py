"""The retention policy: which checkpoints to remove. Pure."""

from collections.abc import Collection, Sequence

from pseudoreal_trainer.checkpoint.manifest import Head


def removable(
    committed: Sequence[Head], keep_last: int, keep_every: int | None, verified: Collection[str]
) -> list[Head]:
    """Return the checkpoints to remove from `committed`, which is ordered from oldest to newest.

    Kept are: the first and last checkpoints of phases; of the others, the newest `keep_last` and all at multiples of
    `keep_every` steps; checkpoints in `verified`, which are known to be intact; and checkpoints that a kept one links
    to.
    """
    inner = [head for head in committed if not head.is_boundary]
    kept = {head.name for head in committed if head.is_boundary}
    kept |= {head.name for head in inner[-keep_last:]}
    kept |= {head.name for head in inner if keep_every and head.step % keep_every == 0}
    kept |= {head.name for head in committed if head.name in verified}
    kept |= {head.data_folder for head in committed if head.name in kept}
    return [head for head in committed if head.name not in kept]
