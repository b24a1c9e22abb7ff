"""Which runs are trained, and in which order. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.method import arms
from benchmarks.method.arms import ARMS, SIZES, Arm, Size, Study
from benchmarks.method.chain import Run
from benchmarks.method.rates import best_rate, next_rates
from benchmarks.method.results import Result, Role
from benchmarks.method.text import COMPARED, TUNING


@dataclass(frozen=True)
class Planned:
    role: Role
    run: Run
    budgets: tuple[float, ...]


def planned(results: Sequence[Result]) -> Iterator[Planned]:
    """Yield the runs that the results so far ask for, the most urgent first: study by study the choice of rates and the
    first size, seed by seed; then the other sizes."""
    for rank in range(max(map(len, SIZES.values()))):
        for study, sizes in SIZES.items():
            if rank == 0:
                for arm in ARMS[study]:
                    if arm.tuned_as == arm.name:
                        yield from _tuning(study, arm, results)
            if rank < len(sizes):
                yield from _compared(study, sizes[rank], results)


def _tuning(study: Study, arm: Arm, results: Sequence[Result]) -> Iterator[Planned]:
    for rate in next_rates(tuning_losses(study, arm.name, results)):
        run = Run(study, arm, arms.TUNED_WIDTH, arms.TUNING_SEED, rate, TUNING, arms.TUNED_FRACTION)
        yield Planned("tuning", run, (1.0,))


def _compared(study: Study, size: Size, results: Sequence[Result]) -> Iterator[Planned]:
    chosen = {arm.tuned_as: rate_of(study, arm, results) for arm in ARMS[study]}
    for seed in range(max(size.seeds, arms.OTHER_SEEDS)):
        for arm in ARMS[study]:
            seeds = size.seeds if arm.is_primary else arms.OTHER_SEEDS if size.all_arms else 0
            rate = chosen[arm.tuned_as]
            if seed < seeds and rate is not None and (not arm.width or size.width in arm.width):
                yield Planned("compared", Run(study, arm, size.width, seed, rate, COMPARED), arm.budgets)


def rate_of(study: Study, arm: Arm, results: Sequence[Result]) -> float | None:
    """Return the chosen peak rate of an arm; None if the choice is not finished."""
    losses = tuning_losses(study, arm.tuned_as, results)
    return None if next_rates(losses) else best_rate(losses)


def tuning_losses(study: Study, name: str, results: Sequence[Result]) -> dict[float, float]:
    """Return rate -> validation loss of the runs that choose the rate of the arm `name`."""
    wanted = (study, "tuning", arms.TUNED_WIDTH, name)
    return {r.rate: r.loss for r in results if (r.study, r.role, r.width, r.arm) == wanted}
