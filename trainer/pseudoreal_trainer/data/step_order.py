"""Where a rank's samples of one step after the other are. Pure.

A call of numpy takes as long for one number as for a thousand, and the keyed permutation makes some hundred calls. So
the samples of many steps are located at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from pseudoreal_trainer.data.sources import MixedStream, Places
from pseudoreal_trainer.data.stream import Part

AT_ONCE = 4096
"""Samples that are located at a time, in whole steps; those of one step at least."""

Step = Mapping[Part, Places]


class StepOrder:
    """The steps are asked for in their order, each once."""

    def __init__(self, stream: MixedStream, parts: Callable[[int], Sequence[Part]], stride: int) -> None:
        """`parts`: of the step that begins at a cursor. `stride`: cursors from one step to the next."""
        self._stream, self._parts, self._stride = stream, parts, stride
        self._located: dict[int, Step] = {}

    def step(self, cursor: int) -> Step:
        """Where the samples of the step are that begins at the cursor."""
        if cursor not in self._located:
            self._located = dict(self._locate(cursor))
        return self._located.pop(cursor)

    def _locate(self, first: int) -> Iterator[tuple[int, Step]]:
        """The steps from that at the cursor `first` on, with their cursors."""
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
