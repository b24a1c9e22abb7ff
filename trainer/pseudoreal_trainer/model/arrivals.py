"""Rows of tokens that came from several ranks to the experts of one."""

import torch
from torch import Tensor


def by_expert(counts: Tensor, rows: int) -> Tensor:
    """Where the rows of the first expert are, then those of the second, ...: [rows]. Rows come from rank after rank,
    each with those of the first expert first; of an expert they keep the order of the ranks, so that it computes on
    them in the order of the whole batch.

    counts: rows from each rank for each expert, [ranks, experts]; `rows`: their sum, which the host knows.
    """
    lengths = counts.t().flatten()  # expert after expert, of each rank after rank
    begins = _begins(counts.flatten()).view_as(counts).t().flatten()  # where these are now
    shifts = (begins - _begins(lengths)).repeat_interleave(lengths, output_size=rows)
    return shifts + torch.arange(rows, device=counts.device)


def _begins(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths
