"""Train the registered arms and write docs/data/method.csv, `python -m benchmarks.method train`; write docs/method.md
from it, `python -m benchmarks.method report`."""

from pathlib import Path

import click
from pseudoreal_dev.machine.progress import progress

from benchmarks.machine import commit
from benchmarks.method.results import RESULTS, read_results
from benchmarks.method.schedule import planned
from benchmarks.method.text import prepare_texts
from benchmarks.method.training import Place, quiet
from benchmarks.method.trials import Trials, train_all

_AT_A_TIME = 2


@click.group()
def main() -> None:
    """Trials of the method: does a pseudo phase pay?"""


@main.command("report")
@click.option("--results", type=click.Path(path_type=Path, exists=True), help="of other trials; the registered ones")
@click.option("--page", type=click.Path(path_type=Path), help="where their page goes; pictures go beside it")
def report(results: Path | None, page: Path | None) -> None:
    """Write docs/method.md, its pictures and the evidence for advice from docs/data/method.csv."""
    # Training needs neither matplotlib nor the planner.
    from benchmarks.method.report import REPORT, write_report

    if (results is None) != (page is None):
        raise click.UsageError("--results and --page go together: the page of the registered trials has its own place")
    if results is None or page is None:
        write_report(read_results())
    else:
        (page.parent / "images").mkdir(parents=True, exist_ok=True)
        write_report(read_results(results), page, page.with_suffix(".evidence.json"))
    progress.note(f"wrote {page or REPORT}")


@main.command("train")
@click.option("--scratch", type=click.Path(path_type=Path), default=Path("benchmark-results/method"), show_default=True)
def train_arms(scratch: Path) -> None:
    """Train what is not trained yet."""
    quiet()
    place = Place(scratch.resolve(), scratch.resolve() / "texts")
    prepare_texts(place.texts)
    train_all(Trials(planned, place, RESULTS, commit(), at_a_time=_AT_A_TIME))


if __name__ == "__main__":
    main()
