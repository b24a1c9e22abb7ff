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
    prepare_texts(place.texts)
    train_all(Trials(planned, place, RESULTS, commit(), at_a_time=_AT_A_TIME))


if __name__ == "__main__":
    main()
