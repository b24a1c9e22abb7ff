"""How many threads a rank has."""

import os


def threads_of(ranks: int) -> int:
    """Number of threads for one operation, on each of `ranks` ranks of this machine."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)
