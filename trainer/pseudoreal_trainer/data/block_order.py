"""The order of a source on object storage: windows shuffled so that a bounded cache requests each byte once. Pure.

In a random order of all windows each request brings one window and is as small as that, or brings others that are gone
from the cache when their turn comes. So windows that lie behind each other form a block, as large as a request; the
blocks have a random order; and so many of them as the cache holds form a group, whose windows have a random order
again. A sample has as many neighbours by chance as a group has blocks, from as many places of the corpus.

Both orders are the keyed permutation, so that any entry is computed by itself. The windows behind the last whole block
are in the last group.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from pseudoreal_api.base import ApiModel
from pydantic import Field

from pseudoreal_trainer.data.permutation import permute

REQUEST_BYTES = 64 << 10
"""Size of a block, unless a window is larger."""
GROUP_BYTES = 16 << 20
"""Size of a group, which a source has in its cache."""

Indices = NDArray[np.int64]
_BLOCKS, _WINDOWS = 1, 2
"""Last part of the key of the order of blocks, and of those of windows."""


class BlockOrder(ApiModel):
    """Checkpoints name it, so what it computes stays."""

    windows: int = Field(ge=1, description="Windows of a block.")
    group: int = Field(ge=1, description="Blocks of a group.")

    @property
    def size(self) -> int:
        """Windows of a group."""
        return self.windows * self.group


def order_of_objects(window_bytes: int) -> BlockOrder:
    """The order of a source on object storage, whose windows have so many bytes each."""
    windows = max(1, REQUEST_BYTES // window_bytes)
    return BlockOrder(windows=windows, group=max(1, GROUP_BYTES // (windows * window_bytes)))


def shuffled_by_blocks(numbers: Indices, samples: int, order: BlockOrder, seed: int, *key: int) -> Indices:
    """The windows, of `samples`, that come as the samples `numbers` of a source, [len(numbers)]. Every epoch has an
    order of its own; a `key` gives a source other orders than one of the same size beside it."""
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
    """The places in `numbers` of the samples of each group, with its epoch and its number in that, one group after the
    other."""
    count = _groups(samples, order)
    epochs, positions = np.divmod(numbers, samples)
    groups = epochs * count + np.minimum(positions // order.size, count - 1)
    for group in np.unique(groups).tolist():
        yield np.flatnonzero(groups == group), *divmod(group, count)


def _groups(samples: int, order: BlockOrder) -> int:
    """Groups of an epoch."""
    return max(1, -(-(samples // order.windows) // order.group))


def _filled(slots: Indices, samples: int, order: BlockOrder, key: tuple[int, ...]) -> Indices:
    """The windows in these slots of an epoch, in which whole blocks lie in their order, and then the other windows."""
    whole = samples // order.windows
    blocks, insides = np.divmod(slots, order.windows)
    found, inside = slots.copy(), blocks < whole
    shuffled = permute(blocks[inside].astype(np.uint64), whole, *key).astype(np.int64)
    found[inside] = shuffled * order.windows + insides[inside]
    return found
