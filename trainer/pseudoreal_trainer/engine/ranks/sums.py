"""Sums over a group of ranks, which the thread of reductions waits for."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


def sums_of(
    lists: Sequence[Sequence[float]], device: torch.device, group: dist.ProcessGroup | None
) -> list[list[float]]:
    """Each list's values, summed over the group in float64. All lists are under way together, and none changes the
    order of sums, and so the bits, of another. `group`: None for a rank that is alone.

    To be called on a lane beside compute: on that of compute it would wait for all passes that are called already.
    """
    if group is None:
        return [[*values] for values in lists]
    summed = [torch.tensor(values, dtype=torch.float64).to(device) for values in lists]
    works = [dist.all_reduce(values, group=group, async_op=True) for values in summed if len(values)]
    for work in works:
        assert work is not None, "this rank is part of the group"
        work.wait()
    return [values.tolist() for values in summed]
