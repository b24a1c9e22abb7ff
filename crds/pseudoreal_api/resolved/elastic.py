"""The numbers of workers that an elastic phase can have, and its layout on each of them. Pure.

The sequences of a step stay as they are, so the losses do; and no rank has more of them in memory at a time than it
has when all workers are there, so only the state takes more memory on fewer workers.
"""

from math import ceil, isqrt

from pseudoreal_api.resolved.resolve import RankCounts, UnresolvableJob, rank_counts
from pseudoreal_api.spec.job import PseudoRealJobSpec
from pseudoreal_api.spec.phase import Phase


def resized(spec: PseudoRealJobSpec, index: int, workers: int) -> PseudoRealJobSpec:
    """The spec with the phase at `index` laid out over so many workers. Raises UnresolvableJob."""
    phases = [*spec.phases]
    phases[index] = laid_out(spec, phases[index], workers)
    return spec.model_copy(update={"phases": phases})


def laid_out(spec: PseudoRealJobSpec, phase: Phase, workers: int) -> Phase:
    """The phase on at most as many workers as it has in the spec: with the fewest micro-batches, at least as many as it
    names, of which a rank has no more sequences at a time than on all workers. Raises UnresolvableJob."""
    most, fewer = _at_a_time(phase, rank_counts(spec, phase)), phase.model_copy(update={"workers": workers})
    ranks = rank_counts(spec, fewer)
    for micro_batches in _divisors(phase.batch.sequences, phase.batch.micro_batches):
        batch = phase.batch.model_copy(update={"micro_batches": micro_batches})
        found = fewer.model_copy(update={"batch": batch})
        if _at_a_time(found, ranks) <= most and _is_resolvable(spec, found):
            return found
    raise UnresolvableJob(
        f"spec.phases[{phase.name}]: no number of micro-batches divides batch.sequences {phase.batch.sequences} so that"
        f" each of {ranks.ranks // ranks.pipeline} data-parallel ranks, on {workers} workers, has between 1 and {most}"
        f" sequences of one, as on {phase.workers}; change batch.sequences or elastic.minWorkers"
    )


def most_workers(spec: PseudoRealJobSpec, phase: Phase, limit: int) -> int | None:
    """The largest number of workers up to `limit` that the phase can have; None where there is none."""
    least = phase.elastic.min_workers if phase.elastic else phase.workers
    return next(
        (number for number in range(min(limit, phase.workers), least - 1, -1) if _fits(spec, phase, number)), None
    )


def check_elastic(spec: PseudoRealJobSpec, phase: Phase) -> None:
    """Checks that the phase can have the least number of workers that it names. Raises UnresolvableJob."""
    if phase.elastic is None:
        return
    least = phase.elastic.min_workers
    try:
        laid_out(spec, phase, least)
    except UnresolvableJob as error:
        more = next(number for number in range(least, phase.workers + 1) if _fits(spec, phase, number))
        raise UnresolvableJob(
            f"spec.phases[{phase.name}].elastic.minWorkers is {least}, and the phase cannot have so many workers"
            f" ({error}); the next number that fits is {more}"
        ) from None


def _fits(spec: PseudoRealJobSpec, phase: Phase, workers: int) -> bool:
    try:
        laid_out(spec, phase, workers)
    except UnresolvableJob:
        return False
    return True


def _is_resolvable(spec: PseudoRealJobSpec, phase: Phase) -> bool:
    try:
        rank_counts(spec, phase)
    except UnresolvableJob:
        return False
    return True


def _at_a_time(phase: Phase, ranks: RankCounts) -> int:
    """Most sequences of a micro-batch on one rank."""
    return ceil(phase.batch.sequences // phase.batch.micro_batches / (ranks.ranks // ranks.pipeline))


def _divisors(number: int, least: int) -> list[int]:
    """Divisors of `number` from `least` on, in ascending order."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({each for divisor in small for each in (divisor, number // divisor) if each >= least})
