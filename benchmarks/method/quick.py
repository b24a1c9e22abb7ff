"""Trials of ten minutes on two cores, beside the registered results: `python -m benchmarks.method.quick`.

The smallest registered size, four arms and two seeds, with the registered peak rates and the full budget alone. The
results stay in the scratch folder.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean

import click
from pseudoreal_dev.machine.progress import progress
from rich.table import Table

from benchmarks.machine import commit
from benchmarks.method.arms import FIRST_RATES, QUICK
from benchmarks.method.results import Result, Role, read_results
from benchmarks.method.schedule import Planned, compared, rate_of
from benchmarks.method.text import prepare_texts
from benchmarks.method.training import Place, quiet
from benchmarks.method.trials import Trials, train_all

_ASSUMED_RATE = FIRST_RATES[1]
"""Peak rate of an arm whose rate is not chosen yet."""
_LEVEL = 0.01
"""Nats below which five seeds show no difference (docs/method-plan.md)."""


@click.command()
@click.option("--scratch", type=click.Path(path_type=Path), default=Path("benchmark-results/method"), show_default=True)
def main(scratch: Path) -> None:
    """Train four small arms and print their order beside the registered one."""
    quiet()
    registered, scratch = read_results(), scratch.resolve()
    place = Place(scratch / "quick", scratch / "texts")
    prepare_texts(place.texts)
    results = train_all(
        Trials(lambda _: planned(registered), place, place.scratch / "quick.csv", commit(), at_a_time=2)
    )
    rates = {one.run.arm.name: one.run.rate for one in planned(registered)}
    here = losses_of(results, "quick", rates)
    before = losses_of(registered, "compared", rates, preferred=QUICK.sizes["dense"][0].width)
    progress.console.print(_table(here, before, rates))
    progress.say(verdict(here, before))


def planned(registered: Sequence[Result]) -> Iterator[Planned]:
    """Yield the runs, at the rates chosen by the registered results."""
    for study, known in QUICK.arms.items():
        rates = {arm.tuned_as: rate_of(study, arm.tuned_as, registered) or _ASSUMED_RATE for arm in known}
        for size in QUICK.sizes[study]:
            yield from compared(study, size, rates, QUICK, "quick")


@dataclass(frozen=True)
class Losses:
    width: int
    seeds: int
    """Most seeds of an arm."""
    by_arm: Mapping[str, float]
    """Arm -> mean loss at the full budget, ascending."""


def losses_of(
    results: Sequence[Result], role: Role, rates: Mapping[str, float], preferred: int | None = None
) -> Losses | None:
    """Return the losses of dense arms at the full budget and at these peak rates, at the preferred width if it has two
    of the arms, or else at the width with the most of them; None if no width has two."""
    widths: dict[int, dict[str, list[float]]] = {}
    for r in results:
        if (r.study, r.role, r.budget) == ("dense", role, 1.0) and rates.get(r.arm) == r.rate and r.loss == r.loss:
            widths.setdefault(r.width, {}).setdefault(r.arm, []).append(r.loss)
    usable = {width: arms for width, arms in widths.items() if len(arms) > 1}
    width = max(usable, key=lambda width: (width == preferred, len(usable[width]), -width), default=None)
    if width is None:
        return None
    means = {arm: mean(losses) for arm, losses in widths[width].items()}
    seeds = max(map(len, widths[width].values()))
    return Losses(width, seeds, dict(sorted(means.items(), key=lambda item: item[1])))


def verdict(here: Losses | None, registered: Losses | None) -> str:
    """Return a sentence on the pairs of arms that the registered results tell apart."""
    if here is None:
        return "fewer than two arms were trained"
    if registered is None:
        return "docs/data/method.csv has no losses of these arms yet; `make bench-method` trains them"
    apart = [
        (better, worse)
        for better, worse in combinations(registered.by_arm, 2)
        if registered.by_arm[worse] - registered.by_arm[better] > _LEVEL and {better, worse} <= {*here.by_arm}
    ]
    if not apart:
        return f"no two of these arms are further apart than {_LEVEL} nats in the registered results"
    turned = [f"{worse} before {better}" for better, worse in apart if here.by_arm[better] >= here.by_arm[worse]]
    said = f"of {len(apart)} pairs of arms that are further apart than {_LEVEL} nats in the registered results"
    if not turned:
        return f"The same order: {said}, all stand in the same order here."
    return f"Another order: {said}, {len(turned)} stand the other way round here: {', '.join(turned)}."


def _table(here: Losses | None, registered: Losses | None, rates: Mapping[str, float]) -> Table:
    table = Table(title="Loss at the full budget, nats per token")
    table.add_column("arm")
    table.add_column("rate", justify="right")
    for losses, origin in ((here, "here"), (registered, "registered")):
        size = "" if losses is None else f", width {losses.width}, {losses.seeds} seeds"
        table.add_column(f"{origin}{size}", justify="right")
        table.add_column("place", justify="right")
    for arm in rates if here is None else here.by_arm:
        table.add_row(arm, f"{rates[arm]:g}", *_cells(here, arm), *_cells(registered, arm))
    return table


def _cells(losses: Losses | None, arm: str) -> tuple[str, str]:
    if losses is None or arm not in losses.by_arm:
        return "not trained", ""
    return f"{losses.by_arm[arm]:.4f}", str([*losses.by_arm].index(arm) + 1)


if __name__ == "__main__":
    main()
