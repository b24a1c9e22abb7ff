"""Possible numbers of workers of an elastic phase, and its layout for each number. Pure.

The sequences of a step stay the same, and so do the losses. No rank has more sequences in memory at a time than with
all workers, so with fewer workers only the state takes more memory.

A few divisions decide whether a number of workers fits, without trying layouts: the operator checks phases of up to
10,000 workers in every reconcile pass.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property

from pseudoreal_api.resolved.cache import cache_per_object
from pseudoreal_api.resolved.resolve import (
    UnresolvableJob,
    divisors,
    has_equal_rounds,
    has_some_layout,
    knows_choices_in_time,
    layers_of,
    rank_counts,
    sequence_ranks,
)
from pseudoreal_api.spec.job import PseudoRealJobSpec
from pseudoreal_api.spec.phase import Phase


def resized(spec: PseudoRealJobSpec, index: int, workers: int) -> PseudoRealJobSpec:
    """Return the spec with the phase at `index` laid out over `workers` workers. Raises UnresolvableJob."""
    phases = [*spec.phases]
    phases[index] = laid_out(spec, phases[index], workers)
    return spec.model_copy(update={"phases": phases})


def laid_out(spec: PseudoRealJobSpec, phase: Phase, workers: int) -> Phase:
    """Return the phase laid out over `workers` workers, at most as many as in the spec.

    The phase gets the fewest micro-batches for which no rank has more sequences at a time than with all workers, but at
    least as many as in the spec. Raises UnresolvableJob.
    """
    layouts, fewer = _Layouts.of(spec, phase), phase.model_copy(update={"workers": workers})
    ranks = rank_counts(spec, fewer)
    micro_batches = layouts.micro_batches(workers)
    if micro_batches is None:
        raise UnresolvableJob(
            f"spec.phases[{phase.name}]: no number of micro-batches divides batch.sequences {phase.batch.sequences} so"
            f" that each of {ranks.data_ranks} data-parallel ranks, on {workers} workers, has between 1"
            f" and {layouts.at_a_time} sequences of a micro-batch, as on {phase.workers} workers; change"
            " batch.sequences or elastic.minWorkers"
        )
    batch = phase.batch.model_copy(update={"micro_batches": micro_batches})
    return fewer.model_copy(update={"batch": batch})


def most_workers(spec: PseudoRealJobSpec, index: int, limit: int) -> int | None:
    """Return the largest possible number of workers, at most `limit`, for the phase at `index`; None if there is
    none."""
    sizes = _sizes(spec, index)
    place = bisect_right(sizes, limit)
    return sizes[place - 1] if place else None


def check_elastic(spec: PseudoRealJobSpec, index: int) -> None:
    """Raise UnresolvableJob if the phase at `index` cannot run with its minimal number of workers."""
    phase = spec.phases[index]
    if phase.elastic is None:
        return
    least = phase.elastic.min_workers
    try:
        laid_out(spec, phase, least)
    except UnresolvableJob as error:
        raise UnresolvableJob(
            f"spec.phases[{phase.name}].elastic.minWorkers is {least}, but the phase cannot run on {least} workers"
            f" ({error}); the next number that fits is {_sizes(spec, index)[0]}"
        ) from None


@cache_per_object
def _sizes(spec: PseudoRealJobSpec, index: int) -> list[int]:
    """Return the possible numbers of workers of the phase at `index`, ascending."""
    phase = spec.phases[index]
    least = phase.elastic.min_workers if phase.elastic else phase.workers
    try:
        layouts = _Layouts.of(spec, phase)
    except UnresolvableJob:
        return []
    return [workers for workers in range(least, phase.workers + 1) if layouts.micro_batches(workers) is not None]


@dataclass(frozen=True)
class _Layouts:
    """Layouts of a phase for different numbers of workers."""

    spec: PseudoRealJobSpec
    phase: Phase
    processes: int
    """Ranks per worker."""
    at_a_time: int
    """Maximum number of sequences of a micro-batch on one rank, with all workers."""

    @classmethod
    def of(cls, spec: PseudoRealJobSpec, phase: Phase) -> "_Layouts":
        """Return the layouts of a phase. Raises UnresolvableJob if the phase cannot run with all workers."""
        ranks, batch = rank_counts(spec, phase), phase.batch
        groups = ranks.data_ranks // sequence_ranks(phase)
        at_a_time = -(-(batch.sequences // batch.micro_batches) // groups)
        return cls(spec, phase, ranks.processes_per_worker, at_a_time)

    def micro_batches(self, workers: int) -> int | None:
        """Return the smallest number of micro-batches with `workers` workers; None if this number of workers is
        impossible."""
        ranks, batch, wanted = workers * self.processes, self.phase.batch, self.phase.parallelism
        if wanted.layout == "Auto":
            fits = has_some_layout(self.spec, self.phase, ranks)
            return self._least(ranks, batch.sequences, 1) if fits else None
        pipeline = ranks if wanted.pipeline == "AllRanks" else wanted.pipeline
        data = ranks // pipeline
        if pipeline > layers_of(self.spec, self.phase) or ranks % pipeline or data % wanted.replicas:
            return None
        of_replica = data // wanted.replicas
        if of_replica % wanted.expert_ranks or of_replica % sequence_ranks(self.phase):
            return None
        groups = data // sequence_ranks(self.phase)
        most = batch.sequences // groups
        if batch.micro_batches > most:
            return None
        if not has_equal_rounds(self.spec, self.phase, pipeline, batch.micro_batches):
            return None
        return self._least(groups, most, pipeline)

    def _least(self, groups: int, most: int, pipeline: int) -> int | None:
        """Return the smallest possible number of micro-batches, at most `most`, with at most `at_a_time` sequences per
        rank at a time; None if there is none. `groups`: number of groups of data-parallel ranks; each group has its own
        sequences."""
        least = -(-self.phase.batch.sequences // (self.at_a_time * groups))
        for number in self._numbers[bisect_left(self._numbers, least) :]:
            if number > most:
                return None
            if has_equal_rounds(self.spec, self.phase, pipeline, number):
                return number
        return None

    @cached_property
    def _numbers(self) -> list[int]:
        """Possible numbers of micro-batches for any number of workers, ascending: divisors of the batch's sequences, at
        least the number in the spec. With a fixed layout, `knows_choices_in_time` must hold."""
        batch, is_chosen = self.phase.batch, self.phase.parallelism.layout == "Auto"
        possible = (each for each in divisors(batch.sequences) if each >= batch.micro_batches)
        return [each for each in possible if is_chosen or knows_choices_in_time(self.spec, self.phase, each)]
