"""Train the registered arms and write docs/data/method.csv: `python -m benchmarks.method`."""

from pathlib import Path

import click

from benchmarks.machine import commit
from benchmarks.method.results import RESULTS
from benchmarks.method.schedule import planned
from benchmarks.method.text import prepare_texts
from benchmarks.method.training import Place, quiet
from benchmarks.method.trials import Trials, train_all

_AT_A_TIME = 2


@click.command()
@click.option("--scratch", type=click.Path(path_type=Path), default=Path("benchmark-results/method"), show_default=True)
def main(scratch: Path) -> None:
    """Train what is not trained yet."""
    quiet()
    place = Place(scratch.resolve(), scratch.resolve() / "texts")
    prepare_texts(place.texts)
    train_all(Trials(planned, place, RESULTS, commit(), at_a_time=_AT_A_TIME))


if __name__ == "__main__":
    main()
