"""Sums over a group of ranks, for the reduction thread."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


def sums_of(
    lists: Sequence[Sequence[float]], device: torch.device, group: dist.ProcessGroup | None
) -> list[list[float]]:
    """Return each list's values, summed over the group in float64. `group`: None for a single rank.

    All lists are in flight together. No list changes the order of summation of another, and so not its bits. Call this
    on a side stream: on the compute stream it would wait for all passes launched so far.
    """
    if group is None:
        return [[*values] for values in lists]
    summed = [torch.tensor(values, dtype=torch.float64).to(device) for values in lists]
    works = [dist.all_reduce(values, group=group, async_op=True) for values in summed if len(values)]
    for work in works:
        assert work is not None, "this rank is part of the group"
        work.wait()
    return [values.tolist() for values in summed]
