"""How many threads a rank has."""

import os


def threads_of(ranks: int) -> int:
    """For one operation, of each of so many ranks on this machine."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)
