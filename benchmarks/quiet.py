"""Refuse to measure beside other programs."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.load.usage import busy_seconds

MOST_BEFORE = 0.1
"""Processors that other programs may take before a measurement."""
MOST_MEANWHILE = 0.2
"""Processors that other programs may take during a measurement. The kernel's own threads count, which write files."""


@contextmanager
def quiet_machine(look_seconds: float = 5.0) -> Iterator[None]:
    """End the program with a sentence if other programs take more than MOST_BEFORE processors in the `look_seconds`
    before the context, or more than MOST_MEANWHILE on average during the context. Children of this process that end
    within the context belong to the measurement."""
    before = _Clock()
    time.sleep(look_seconds)
    if (others := before.others()) > MOST_BEFORE:
        raise SystemExit(
            f"other programs take {others:.1f} processors, more than {MOST_BEFORE}: end them, then measure"
        )
    meanwhile = _Clock()
    yield
    if (others := meanwhile.others()) > MOST_MEANWHILE:
        raise SystemExit(
            f"other programs took {others:.1f} processors during the measurement, more than {MOST_MEANWHILE}:"
            " its figures are on no page; measure again"
        )


class _Clock:
    def __init__(self) -> None:
        self._time, self._busy, self._own = time.monotonic(), busy_seconds(), _own_seconds()

    def others(self) -> float:
        """Return the processors that other programs have taken, on average since this clock was made."""
        busy, own = busy_seconds() - self._busy, _own_seconds() - self._own
        return (busy - own) / (time.monotonic() - self._time)


def _own_seconds() -> float:
    """Return the processor seconds of this process, and of its children that have ended."""
    of = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in of)
