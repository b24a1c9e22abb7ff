"""The order of a source on object storage: a block-wise shuffle of windows in which a bounded cache requests each byte
once. Pure.

In a random order of single windows, each request either brings one window and is small, or brings neighbours that are
evicted from the cache before their turn. Here, consecutive windows form a block, as large as a request, and the blocks
are shuffled. As many blocks as the cache holds form a group, and the windows of a group are shuffled again. A sample's
neighbours are therefore drawn from as many places of the corpus as a group has blocks.

Both shuffles use the keyed permutation, so any entry is computed on its own. Windows after the last whole block belong
to the last group.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from pseudoreal_api.base import ApiModel
from pydantic import Field

from pseudoreal_trainer.data.permutation import permute

REQUEST_BYTES = 64 << 10
"""Maximum size of a block in bytes, unless a window is larger."""
GROUP_BYTES = 16 << 20
"""Maximum size of a group in bytes, unless a block is larger. The source's cache holds one group."""

Indices = NDArray[np.int64]
_BLOCKS, _WINDOWS = 1, 2
"""Part of a shuffle's key: the shuffle of an epoch's blocks, or the shuffle of a group's windows."""


class BlockOrder(ApiModel):
    """Parameters of the shuffle. They are recorded in checkpoints: the resulting order must never change."""

    windows: int = Field(ge=1, description="Windows of a block.")
    group: int = Field(ge=1, description="Blocks of a group.")

    @property
    def size(self) -> int:
        """Number of windows in a group."""
        return self.windows * self.group


def order_of_objects(window_bytes: int) -> BlockOrder:
    """Return the order of a source on object storage with windows of `window_bytes` bytes."""
    windows = max(1, REQUEST_BYTES // window_bytes)
    return BlockOrder(windows=windows, group=max(1, GROUP_BYTES // (windows * window_bytes)))


def shuffled_by_blocks(numbers: Indices, samples: int, order: BlockOrder, seed: int, *key: int) -> Indices:
    """Return the window index, below `samples`, of each of the samples `numbers` of a source, [len(numbers)]. Every
    epoch has its own order; `key` distinguishes sources of the same size."""
    found = np.empty(len(numbers), np.int64)
    last = _groups(samples, order) - 1
    for rows, epoch, group in groups_of(numbers, samples, order):
        begin = group * order.size
        size = samples - begin if group == last else order.size
        places = (numbers[rows] % samples - begin).astype(np.uint64)
        slots = begin + permute(places, size, seed, epoch, *key, _WINDOWS, group).astype(np.int64)
        found[rows] = _filled(slots, samples, order, (seed, epoch, *key, _BLOCKS))
    return found


def groups_of(numbers: Indices, samples: int, order: BlockOrder) -> Iterator[tuple[Indices, int, int]]:
    """Yield for each group: the indices into `numbers` of its samples, its epoch, and its number in the epoch."""
    count = _groups(samples, order)
    epochs, positions = np.divmod(numbers, samples)
    groups = epochs * count + np.minimum(positions // order.size, count - 1)
    for group in np.unique(groups).tolist():
        yield np.flatnonzero(groups == group), *divmod(group, count)


def _groups(samples: int, order: BlockOrder) -> int:
    """Return the number of groups in an epoch."""
    return max(1, -(-(samples // order.windows) // order.group))


def _filled(slots: Indices, samples: int, order: BlockOrder, key: tuple[int, ...]) -> Indices:
    """Return the windows in these slots of an epoch. The slots hold the whole blocks in shuffled order, then the
    remaining windows."""
    whole = samples // order.windows
    blocks, insides = np.divmod(slots, order.windows)
    found, inside = slots.copy(), blocks < whole
    shuffled = permute(blocks[inside].astype(np.uint64), whole, *key).astype(np.int64)
    found[inside] = shuffled * order.windows + insides[inside]
    return found
