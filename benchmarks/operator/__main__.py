"""Measures the operator with many jobs: `python -m benchmarks.operator --jobs 200 --jobs 1000`.

Writes docs/data/operator.json, the section of docs/benchmarks/operator.md, and the claim.
"""

import asyncio
from datetime import UTC, datetime

import click
from pseudoreal_dev.machine.progress import progress

from benchmarks import claims, machine, pages
from benchmarks.operator.course import Course, Settings
from benchmarks.operator.results import OPERATOR, Record, claim, read, section
from benchmarks.operator.site import site
from benchmarks.quiet import quiet_machine
from tests.support.load.audit import policy


@click.command(help=__doc__)
@click.option("--jobs", multiple=True, default=(200, 1000, 5000), show_default=True, help="Jobs in flight; repeatable.")
@click.option("--rate", default=1.0, show_default=True, help="Jobs whose first pods end, a second.")
@click.option("--sample", default=100, show_default=True, help="Jobs that come to their ends at that rate.")
@click.option("--together", default=200, show_default=True, help="Jobs that then come to their ends together.")
@click.option("--quiet", default=70.0, show_default=True, help="Seconds in which nothing changes.")
@click.option("--write/--no-write", default=True, show_default=True, help="Results and report.")
def main(jobs: tuple[int, ...], rate: float, sample: int, together: int, quiet: float, write: bool) -> None:
    for number in jobs:
        settings = Settings(number, rate, min(sample, number // 2), together, quiet)
        with quiet_machine():
            record = _measured(settings)
        progress.note(record.model_dump_json(indent=1))
        if write:
            _write(record)


def _measured(settings: Settings) -> Record:
    with site(policy()) as found:
        measures = asyncio.run(Course(found, settings).run())
    return Record(
        jobs=settings.jobs,
        date=datetime.now(UTC).date().isoformat(),
        commit=machine.commit(),
        release=machine.release(),
        machine=machine.hardware(),
        rate=settings.rate,
        **measures,
    )


def _write(record: Record) -> None:
    OPERATOR.parent.mkdir(exist_ok=True)
    OPERATOR.write_text(read().with_record(record).model_dump_json(indent=1) + "\n")
    machine.stamp(OPERATOR)
    pages.put_section(pages.OPERATOR, section())
    claims.put(claim(read().records))


if __name__ == "__main__":
    main()
