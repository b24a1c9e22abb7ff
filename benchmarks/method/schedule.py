"""Which runs are trained, and in which order. Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.method import arms
from benchmarks.method.arms import REGISTERED, Arm, Scale, Size, Study
from benchmarks.method.chain import Link, Run, decays
from benchmarks.method.rates import best_rate, next_lower_rates, next_rates
from benchmarks.method.results import Result, Role

Plan = Callable[[Sequence[Result]], Iterator["Planned"]]
"""The results so far -> the runs that they ask for, the most urgent first; some may have their results already."""


@dataclass(frozen=True)
class Planned:
    role: Role
    run: Run
    budgets: tuple[float, ...]

    def decays(self) -> list[tuple[float, Link]]:
        """Return each budget with its decay."""
        return [*zip(self.budgets, decays(self.run, self.budgets), strict=True)]


def planned(results: Sequence[Result], scale: Scale = REGISTERED) -> Iterator[Planned]:
    """Yield the runs that the results so far ask for, the most urgent first: study by study the choice of rates and the
    first size, seed by seed; then the second size; then the remedies; then the third size."""
    for rank in range(max(map(len, scale.sizes.values()))):
        if rank == 2:
            yield from _remedies(results, scale)
        for study, sizes in scale.sizes.items():
            if rank == 0:
                for arm in scale.arms[study]:
                    if arm.tuned_as == arm.name:
                        yield from _tuning(study, arm, results, scale)
            if rank < len(sizes):
                chosen = {arm.tuned_as: rate_of(study, arm.tuned_as, results, scale) for arm in scale.arms[study]}
                yield from compared(study, sizes[rank], chosen, scale)


def expected(results: Sequence[Result], scale: Scale) -> Iterator[Planned]:
    """Yield the runs as `planned` does, and those that wait for a rate: with a middle rate in its place, with one rate
    more than the first ones at half the budget, and two at the full one. Only their number and lengths mean
    something."""
    assumed = scale.first_rates[len(scale.first_rates) // 2]
    for study, known in scale.arms.items():
        for arm in known:
            if arm.tuned_as == arm.name:
                yield from _tuning(study, arm, results, scale)
                if next_rates(tuning_losses(study, arm.name, results, scale), scale.first_rates):
                    yield _tuning_run(study, arm, 2 * max(scale.first_rates), scale)
                    for rate in next_lower_rates({}, assumed):
                        yield _tuning_run(study, arm, rate, scale, fraction=1.0)
        chosen = {arm.tuned_as: rate_of(study, arm.tuned_as, results, scale) or assumed for arm in known}
        for size in scale.sizes[study]:
            yield from compared(study, size, chosen, scale)


def _tuning(study: Study, arm: Arm, results: Sequence[Result], scale: Scale) -> Iterator[Planned]:
    half = tuning_losses(study, arm.name, results, scale)
    if rates := next_rates(half, scale.first_rates):
        yield from (_tuning_run(study, arm, rate, scale) for rate in rates)
    else:
        full = tuning_losses(study, arm.name, results, scale, 1.0)
        for rate in next_lower_rates(full, best_rate(half)):
            yield _tuning_run(study, arm, rate, scale, fraction=1.0)


def _tuning_run(study: Study, arm: Arm, rate: float, scale: Scale, fraction: float = arms.TUNED_FRACTION) -> Planned:
    run = Run(study, arm, scale.tuned_width, arms.TUNING_SEED, rate, scale.tuning_text, fraction, scale)
    return Planned("tuning", run, (1.0,))


def _remedies(results: Sequence[Result], scale: Scale) -> Iterator[Planned]:
    """Yield the runs of the remedies, at the width of the chosen rates, seed by seed."""
    for study, known in scale.remedies.items():
        for seed in range(arms.OTHER_SEEDS):
            for arm in known:
                rate = rate_of(study, arm.tuned_as, results, scale)
                first = None if arm.first_tuned_as is None else rate_of(study, arm.first_tuned_as, results, scale)
                if rate is not None and (first is not None or arm.first_tuned_as is None):
                    run = Run(study, arm, scale.tuned_width, seed, rate, scale.text, scale=scale, first_rate=first)
                    yield Planned("compared", run, arm.budgets)


def compared(
    study: Study, size: Size, chosen: Mapping[str, float | None], scale: Scale, role: Role = "compared"
) -> Iterator[Planned]:
    """Yield the runs of a size whose rate is chosen, seed by seed. `chosen`: `tuned_as` -> peak rate."""
    for seed in range(max(size.seeds, arms.OTHER_SEEDS)):
        for arm in scale.arms[study]:
            rate = chosen[arm.tuned_as]
            if seed < seeds_of(arm, size) and rate is not None:
                yield Planned(
                    role, Run(study, arm, size.width, seed, rate, scale.text, scale=scale), scale.budgets or arm.budgets
                )


def seeds_of(arm: Arm, size: Size) -> int:
    """Return the seeds that the plan has of an arm at a size."""
    if arm.width and size.width not in arm.width:
        return 0
    return size.seeds if arm.is_primary else min(size.seeds, arms.OTHER_SEEDS) if size.all_arms else 0


def rate_of(study: Study, name: str, results: Sequence[Result], scale: Scale = REGISTERED) -> float | None:
    """Return the peak rate of the arm `name`; None while trainings that decide it have no result. Raises ValueError if
    all trainings of the arm diverged."""
    half = tuning_losses(study, name, results, scale)
    if next_rates(half, scale.first_rates):
        return None
    full = tuning_losses(study, name, results, scale, 1.0)
    return None if next_lower_rates(full, best_rate(half)) else best_rate(full)


def tuning_losses(
    study: Study, name: str, results: Sequence[Result], scale: Scale = REGISTERED, budget: float = arms.TUNED_FRACTION
) -> dict[float, float]:
    """Return rate -> validation loss at a budget of the runs that choose the rate of the arm `name`."""
    wanted = (study, "tuning", scale.tuned_width, name, budget)
    return {r.rate: r.loss for r in results if (r.study, r.role, r.width, r.arm, r.budget) == wanted}


def is_known(one: Planned, budget: float, results: Sequence[Result]) -> bool:
    """Return whether the run has a result at this budget."""
    run = one.run
    wanted = (run.study, one.role, run.width, run.arm.name, run.seed, run.rate, budget * run.fraction)
    return any(wanted == (r.study, r.role, r.width, r.arm, r.seed, r.rate, r.budget) for r in results)


def unfinished(runs: Iterable[Planned], results: Sequence[Result]) -> dict[str, Link]:
    """Return key -> link: the decays without a result, and the links that lead to them, in the order of the runs and
    each after its parent."""
    found: dict[str, Link] = {}
    for one in runs:
        for budget, decay in one.decays():
            if not is_known(one, budget, results):
                found |= {link.key: link for link in decay.ancestry()}
    return found


def real_steps(link: Link) -> float:
    """Return the steps that the link trains, in steps of the real phase; a step of fewer layers counts by its
    layers."""
    begin, total = link.begin, 0.0
    for stage in link.stages:
        end = min(link.end, round(link.run.steps * stage.until))
        total += max(0, end - begin) * stage.layers / arms.LAYERS[link.run.study]
        begin = max(begin, end)
    return total
