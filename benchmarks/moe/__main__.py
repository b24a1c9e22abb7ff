"""Trains mixtures, and times their steps: `python -m benchmarks.moe`.

Each part writes its results to docs/data/, and its section of docs/benchmarks/mixtures.md.
"""

import sys
from collections.abc import Callable
from typing import Any

import click
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_dev.machine.progress import progress

from benchmarks import claims, machine, pages
from benchmarks.agreement import LossesDiffer
from benchmarks.moe import losses
from benchmarks.moe.beside import measure as beside
from benchmarks.moe.results import Results, read, write
from benchmarks.moe.steps import grouped, growth, routing
from benchmarks.moe.steps_report import claim, section
from benchmarks.quiet import quiet_machine

LOSSES = "losses"
PARTS: dict[str, Callable[[], Any]] = {
    "beside": beside.measure,
    "growth": growth.measure,
    "routing": routing.measure,
    "grouped": grouped.measure,
}
"""Timed parts in their order, by the field of the results."""


@click.command(help=__doc__)
@click.option("--only", multiple=True, type=click.Choice([LOSSES, *PARTS]), help="A part; the others stay as they are.")
def main(only: tuple[str, ...]) -> None:
    try:
        if not only or LOSSES in only:
            losses.main()
        if timed := [part for part in PARTS if not only or part in only]:
            time_steps(timed)
    except (DevError, LossesDiffer) as error:
        progress.console.print(str(error), style="red", markup=False)
        sys.exit(1)


def time_steps(parts: list[str]) -> None:
    """Time the parts. Raises LossesDiffer if two stacks do not compute the same, and DevError if a program fails."""
    described = machine.describe(["torch"])
    results = read() or Results(machine=described)
    with quiet_machine():
        for name in parts:
            stamps = results.measured | {name: machine.stamp_of_today()}
            results = results.model_copy(update={name: PARTS[name](), "machine": described, "measured": stamps})
            write(results)
    pages.put_section(pages.MIXTURES, section(results))
    if results.beside:
        claims.put(claim(results))


if __name__ == "__main__":
    main()
