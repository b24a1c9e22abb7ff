"""Which window of which source is the sample at a cursor, over all phases of a job. Pure.

A phase may have another mixture than the one before it. It goes on in each source where the phases before it stopped,
also where they ended early, so that no change of the mixture repeats or skips a window. Nothing here depends on ranks,
restarts, or on how long training is meant to be.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pseudoreal_trainer.data.mixture import Mixture, Numbers, mixture
from pseudoreal_trainer.errors import InvalidJobError


@dataclass(frozen=True)
class Stretch:
    """The samples of one phase."""

    begin: int
    """Cursor at which the phase begins: samples before it, over all sources and phases."""
    names: tuple[str, ...]
    """The sources of its mixture."""
    mixture: Mixture
    before: Mapping[str, int]
    """Samples of each source before the phase; of those that are not named, none."""

    def locate(self, cursors: Numbers) -> tuple[Numbers, Numbers]:
        """For cursors of the phase: the source, as its place in `names`, and the sample's number among all samples of
        its source since the job's start; both [len(cursors)]."""
        assert cursors.min(initial=self.begin) >= self.begin
        sources, numbers = self.mixture.locate(cursors - self.begin)
        before = np.array([self.before.get(name, 0) for name in self.names], dtype=np.int64)
        return sources, numbers + before[sources]

    def consumed(self, cursor: int) -> dict[str, int]:
        """Samples of each source before the cursor, since the job's start: what checkpoints store."""
        counts = dict(zip(self.names, self.mixture.counts(cursor - self.begin), strict=True))
        return {name: self.before.get(name, 0) + counts.get(name, 0) for name in {**self.before, **counts}}


def stretch(begin: int, weights: Mapping[str, int], before: Mapping[str, int]) -> Stretch:
    """The samples of a phase that begins at a cursor. `weights`: of each source of its mixture. `before`: what was
    consumed of each source by then. Raises ValueError where the weights have too long a period."""
    assert sum(before.values()) == begin
    return Stretch(begin, tuple(weights), mixture([*weights.values()]), before)


def continued(at: int, phase_begin: int, weights: Mapping[str, int], consumed: Mapping[str, int]) -> Stretch:
    """The samples of a phase that began at the cursor `phase_begin`, from what a checkpoint at the cursor `at` says
    was consumed."""
    counts = dict(zip(weights, mixture([*weights.values()]).counts(at - phase_begin), strict=True))
    return stretch(phase_begin, weights, {name: count - counts.get(name, 0) for name, count in consumed.items()})


def planned(first: Stretch, ends: Sequence[tuple[int, Mapping[str, int]]]) -> Stretch:
    """The last phase if `first` and all behind it go as far as they may. `ends`: for each phase behind it, the cursor
    at which the one before ends, and its weights."""
    last = first
    for begin, weights in ends:
        last = stretch(begin, weights, last.consumed(begin))
    return last


def check_epochs(last: Stretch, end: int, samples: Mapping[str, int], most: Mapping[str, int]) -> None:
    """Checks how often each source is read by the end of training. It is called at the start of each phase, since a
    phase that ended early leaves more to the ones behind it. `last`: the last phase, with all before it as long as they
    may be; `end`: the cursor at which it ends. `samples`: of an epoch, by source. `most`: epochs that are allowed, of
    those sources that have a bound. Raises InvalidJobError."""
    for name, count in last.consumed(end).items():
        bound = most.get(name)
        if bound is not None and count > bound * samples[name]:
            raise InvalidJobError(
                f"the job reads {count:,} samples of the source {name}, which has {samples[name]:,}: that is"
                f" {count / samples[name]:.2f} epochs, and its maxEpochs is {bound}; give it more text or less weight,"
                " end the job earlier, or raise maxEpochs"
            )
