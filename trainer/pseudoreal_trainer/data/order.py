"""Mapping from the cursor of a sample to a window of a source, over all phases of a job. Pure.

A phase may change the mixture. In each source, the phase continues where the phases before stopped, even if they ended
early, so no change of the mixture repeats or skips a window. Nothing here depends on ranks, restarts, or the planned
length of training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pseudoreal_trainer.data.mixture import Mixture, Numbers, mixture
from pseudoreal_trainer.errors import InvalidJobError


@dataclass(frozen=True)
class PhaseSamples:
    """The samples of one phase."""

    begin: int
    """Cursor at the start of the phase: the number of samples before it, over all sources and phases."""
    names: tuple[str, ...]
    """Names of the mixture's sources."""
    mixture: Mixture
    before: Mapping[str, int]
    """Samples of each source before the phase; 0 for sources without an entry."""

    def locate(self, cursors: Numbers) -> tuple[Numbers, Numbers]:
        """Return the source of each sample, as an index into `names`, and the sample's number among the samples of its
        source since the job's start; both [len(cursors)]. `cursors`: cursors of the phase."""
        assert cursors.min(initial=self.begin) >= self.begin, "no sample lies before the start of its phase"
        sources, numbers = self.mixture.locate(cursors - self.begin)
        before = np.array([self.before.get(name, 0) for name in self.names], dtype=np.int64)
        return sources, numbers + before[sources]

    def consumed(self, cursor: int) -> dict[str, int]:
        """Return the samples of each source before the cursor, since the job's start, as stored in checkpoints."""
        counts = dict(zip(self.names, self.mixture.counts(cursor - self.begin), strict=True))
        return {name: self.before.get(name, 0) + counts.get(name, 0) for name in {**self.before, **counts}}


def phase_samples(begin: int, weights: Mapping[str, int], before: Mapping[str, int]) -> PhaseSamples:
    """Return the samples of a phase that starts at the cursor `begin`. `weights`: source of its mixture -> weight.
    `before`: samples of each source consumed before the phase. Raises ValueError if the weights have too long a
    period."""
    assert sum(before.values()) == begin, "the cursor counts the samples of all sources"
    return PhaseSamples(begin, tuple(weights), mixture([*weights.values()]), before)


def continue_phase(at: int, phase_begin: int, weights: Mapping[str, int], consumed: Mapping[str, int]) -> PhaseSamples:
    """Return the samples of a phase that started at the cursor `phase_begin`, from the samples `consumed` up to a
    checkpoint at the cursor `at`."""
    counts = dict(zip(weights, mixture([*weights.values()]).counts(at - phase_begin), strict=True))
    return phase_samples(phase_begin, weights, {name: count - counts.get(name, 0) for name, count in consumed.items()})


def project_phases(first: PhaseSamples, ends: Sequence[tuple[int, Mapping[str, int]]]) -> PhaseSamples:
    """Return the samples of the last phase if `first` and all phases after it run to their limits. `ends`: for each
    phase after `first`, the cursor at which the phase before it ends, and its weights."""
    last = first
    for begin, weights in ends:
        last = phase_samples(begin, weights, last.consumed(begin))
    return last


def check_epochs(last: PhaseSamples, end: int, samples: Mapping[str, int], most: Mapping[str, int]) -> None:
    """Raise InvalidJobError if a source is read more often than its maxEpochs by the end of training.

    Called at the start of each phase, because a phase that ended early leaves more samples to the later ones. `last`:
    the last phase, if all phases before it run to their limits; `end`: the cursor at which it ends. `samples`: samples
    of an epoch, by source. `most`: allowed epochs, by source, for sources with a limit.
    """
    for name, count in last.consumed(end).items():
        bound = most.get(name)
        if bound is not None and count > bound * samples[name]:
            raise InvalidJobError(
                f"the job reads {count:,} samples of the source {name}, which has {samples[name]:,}: that is"
                f" {count / samples[name]:.2f} epochs, and its maxEpochs is {bound}; give it more text or less weight,"
                " end the job earlier, or raise maxEpochs"
            )
