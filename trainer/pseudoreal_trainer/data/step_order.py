"""Locations of a rank's samples, step by step. Pure.

A numpy call takes as long for one number as for a thousand, and the keyed permutation makes some hundred calls. The
samples of many steps are therefore located at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from pseudoreal_trainer.data.sources import MixedStream, Places
from pseudoreal_trainer.data.stream import Part

AT_ONCE = 4096
"""Samples located at once, in whole steps; at least the samples of one step."""

Step = Mapping[Part, Places]


class StepOrder:
    """Locations of the samples of consecutive steps. Each step is requested once, in order."""

    def __init__(self, stream: MixedStream, parts: Callable[[int], Sequence[Part]], stride: int) -> None:
        """`parts`: returns the parts of the step that starts at a cursor. `stride`: distance between the cursors of two
        steps."""
        self._stream, self._parts, self._stride = stream, parts, stride
        self._located: dict[int, Step] = {}

    def step(self, cursor: int) -> Step:
        """Return the locations of the samples of the step that starts at `cursor`."""
        if cursor not in self._located:
            self._located = dict(self._locate(cursor))
        return self._located.pop(cursor)

    def _locate(self, first: int) -> Iterator[tuple[int, Step]]:
        """Yield the steps from the cursor `first` on, with their cursors."""
        own = sum(end - begin for begin, end in self._parts(first))
        count = max(1, AT_ONCE // max(1, own))
        steps = {cursor: self._parts(cursor) for cursor in range(first, first + count * self._stride, self._stride)}
        cursors = [np.arange(*part) for parts in steps.values() for part in parts]
        found, begin = self._stream.places(np.concatenate(cursors)), 0
        for cursor, parts in steps.items():
            step = dict[Part, Places]()
            for part in parts:
                end = begin + part[1] - part[0]
                step[part], begin = found.part(begin, end), end
            yield cursor, step
