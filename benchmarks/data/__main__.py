"""Measures text, token files, vocabularies and a trained model: `python -m benchmarks.data`.

Writes docs/data/data.json after each part, and then the section of docs/benchmarks/data.md and the claim.
"""

import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import click
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_dev.machine.progress import progress

from benchmarks import claims, machine, pages
from benchmarks.agreement import LossesDiffer
from benchmarks.data import losses, preparing, reading, resident, training
from benchmarks.data.report import claim, section
from benchmarks.data.results import DATA, Part, Results, read, write
from benchmarks.quiet import quiet_machine

COMPARED = ("torch", "tokenizers", "transformers")
PARTS: dict[str, Callable[[Path, bool], Part]] = {
    "preparing": preparing.measure,
    "reading": reading.measure,
    "resident": resident.measure,
    "losses": losses.measure,
    "training": training.measure,
}
"""Parts in their order, by the field of the results."""


@click.command(help=__doc__)
@click.option("--only", multiple=True, type=click.Choice([*PARTS]), help="A part; the others stay as they are.")
@click.option("--tiny", is_flag=True, help="Only try the programs: small sizes, and nothing is written.")
def main(only: tuple[str, ...], tiny: bool) -> None:
    try:
        with nullcontext() if tiny else quiet_machine():
            found = measure(only or tuple(PARTS), tiny)
    except (DevError, LossesDiffer) as error:
        progress.console.print(str(error), style="red", markup=False)
        sys.exit(1)
    text = section(found)
    if tiny:
        progress.note(text)
    else:
        pages.put_section(pages.DATA, text)
        claims.put(claim(found))


def measure(parts: tuple[str, ...], tiny: bool) -> Results:
    """Measure the parts. Raises LossesDiffer if two stacks do not compute the same, and DevError if a program fails."""
    described = machine.describe(COMPARED)
    results = (None if tiny else read()) or Results(machine=described)
    DATA.parent.mkdir(exist_ok=True)
    for name in parts:
        # Not in the system's temporary folder, which may be in memory.
        with tempfile.TemporaryDirectory(dir=DATA.parent, prefix="data-") as folder:
            found = PARTS[name](Path(folder), tiny)
        results = results.with_part(name, found, machine.stamp_of_today(), described)
        if not tiny:
            write(results)
    return results


if __name__ == "__main__":
    main()
