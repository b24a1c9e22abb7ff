"""Train the registered arms and write docs/data/method.csv, `python -m benchmarks.method train`; write docs/method.md
from it, `python -m benchmarks.method report`.

Training continues where it ended: every trained job stays in the scratch folder, and every result in the CSV file.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from pathlib import Path

import click
from pseudoreal_dev.machine.progress import progress

from benchmarks.machine import commit
from benchmarks.method.arms import TOKENS_OF_A_STEP
from benchmarks.method.chain import Link, decays
from benchmarks.method.results import Result, read_results, write_results
from benchmarks.method.schedule import Planned, planned
from benchmarks.method.text import prepare_texts
from benchmarks.method.training import Place, Trained, quiet, train

_AT_A_TIME = 2


@click.group()
def main() -> None:
    """Trials of the method: does a pseudo phase pay?"""


@main.command("report")
def report() -> None:
    """Write docs/method.md, its pictures and the evidence for advice from docs/data/method.csv."""
    # Training needs neither matplotlib nor the planner.
    from benchmarks.method.report import REPORT, write_report

    write_report(read_results())
    progress.note(f"wrote {REPORT}")


@main.command("train")
@click.option("--scratch", type=click.Path(path_type=Path), default=Path("benchmark-results/method"), show_default=True)
def train_arms(scratch: Path) -> None:
    """Train what is not trained yet."""
    quiet()
    place = Place(scratch.resolve(), scratch.resolve() / "texts")
    place.texts.mkdir(parents=True, exist_ok=True)
    prepare_texts(place.texts)
    trained_by, results = commit(), read_results()
    running: dict[Future[Trained], str] = {}
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        while True:
            results = _collect(results, place, trained_by)
            for link in _waiting(planned(results), results, place):
                if len(running) == _AT_A_TIME:
                    break
                if link.key not in running.values():
                    running[pool.submit(train, link, place)] = link.key
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                done.result()
                del running[done]


def _collect(results: Sequence[Result], place: Place, trained_by: str) -> list[Result]:
    """Return the results with those of decays trained since, and write them."""
    found = [*results]
    for one in planned(results):
        for budget, decay in _decays(one):
            if not _is_known(one, budget, results) and (trained := place.known(decay)) is not None:
                found.append(_result(one, budget, decay, trained, trained_by))
                progress.note(f"{one.role} {one.run.study} {one.run.width}, {one.run.arm.name}, seed {one.run.seed},"
                              f" rate {one.run.rate:g}, {budget:.0%}: {found[-1].loss:.4f}")  # fmt: skip
    if len(found) > len(results):
        write_results(found)
        return _collect(found, place, trained_by)
    return found


def _waiting(wanted: Iterable[Planned], results: Sequence[Result], place: Place) -> Iterator[Link]:
    """Yield the first link of each run that is not trained yet, in the order of the runs."""
    for one in wanted:
        for budget, decay in _decays(one):
            if not _is_known(one, budget, results):
                yield next(link for link in _ancestry(decay) if place.known(link) is None)
                break


def _ancestry(link: Link) -> list[Link]:
    """Return the links that lead to `link`, the first one first, and `link`."""
    return [*([] if link.parent is None else _ancestry(link.parent)), link]


def _decays(one: Planned) -> list[tuple[float, Link]]:
    return [*zip(one.budgets, decays(one.run, one.budgets), strict=True)]


def _is_known(one: Planned, budget: float, results: Sequence[Result]) -> bool:
    run = one.run
    wanted = (run.study, one.role, run.width, run.arm.name, run.seed, run.rate, budget * run.fraction)
    return any(wanted == (r.study, r.role, r.width, r.arm, r.seed, r.rate, r.budget) for r in results)


def _result(one: Planned, budget: float, decay: Link, trained: Trained, trained_by: str) -> Result:
    assert trained.loss is not None, "a decay has a loss"
    return Result(
        study=one.run.study,
        role=one.role,
        width=one.run.width,
        arm=one.run.arm.name,
        seed=one.run.seed,
        rate=one.run.rate,
        budget=budget * one.run.fraction,
        steps=decay.end,
        tokens=decay.end * TOKENS_OF_A_STEP,
        loss=trained.loss,
        validation_tokens=trained.validation_tokens,
        seconds_per_step=trained.seconds_per_step,
        peak_bytes=trained.peak_bytes,
        date=datetime.now(UTC).date().isoformat(),
        commit=trained_by,
    )


if __name__ == "__main__":
    main()
