"""Measures the operator beside Kubeflow's: `python -m benchmarks.operator.beside --jobs 200 --workers 1000`.

Writes docs/data/operator-beside.json, the section of docs/benchmarks/operator.md, its picture, and the claim.
"""

import click
from pseudoreal_dev.machine.progress import progress

from benchmarks import claims, machine, pages
from benchmarks.operator.beside import reports
from benchmarks.operator.beside.course import Load, measure
from benchmarks.operator.beside.loss import measure as measure_loss
from benchmarks.operator.beside.report import claim, draw, section
from benchmarks.operator.beside.results import BESIDE, Life, Lives, read
from benchmarks.operator.beside.stacks import RESTARTING, STACKS, TWO_PHASES, Stack
from benchmarks.quiet import quiet_machine

_PODS, _MANY = 2, (200, 1000, 5000)
_WORKERS = (1000, 5000, 10_000)
_REPORTING_SECONDS = 30.0
_TITLES = tuple(stack.title for stack in STACKS)


@click.command(help=__doc__)
@click.option("--jobs", multiple=True, default=_MANY, show_default=True, help="Jobs of 2 pods, 0 for none; repeatable.")
@click.option(
    "--workers", multiple=True, default=_WORKERS, show_default=True, help="Pods of one job, 0 for none; repeatable."
)
@click.option("--only", multiple=True, type=click.Choice(_TITLES), default=_TITLES, help="Stacks; repeatable.")
@click.option("--reporters", default=1000, show_default=True, help="Pods that report every second, 0 for none.")
@click.option("--lost", default=1000, show_default=True, help="Pods of one job that are lost at once, 0 for none.")
@click.option("--idle", default=60.0, show_default=True, help="Seconds after the end in which nothing changes.")
def main(
    jobs: tuple[int, ...], workers: tuple[int, ...], only: tuple[str, ...], reporters: int, lost: int, idle: float
) -> None:
    stacks = [stack for stack in STACKS if stack.title in only]
    for number in filter(None, jobs):
        for stack in stacks:
            _write(read().with_life(_measured(stack, Load(number, _PODS, idle))))
    for number in filter(None, workers):
        for stack in stacks:
            if stack is not TWO_PHASES:
                _write(read().with_life(_measured(stack, Load(1, number, idle))))
    for stack in RESTARTING if lost else ():
        with quiet_machine():
            loss = measure_loss(stack, lost)
        progress.note(loss.model_dump_json(indent=1))
        _write(read().with_loss(loss))
    if reporters:
        with quiet_machine():
            reporting = reports.measure(reporters, _REPORTING_SECONDS)
        progress.note(reporting.model_dump_json(indent=1))
        _write(read().model_copy(update={"reporting": reporting}))


def _measured(stack: Stack, load: Load) -> Life:
    with quiet_machine():
        life = measure(stack, load)
    progress.note(life.model_dump_json(indent=1))
    return life


def _write(found: Lives) -> None:
    BESIDE.parent.mkdir(exist_ok=True)
    BESIDE.write_text(found.model_dump_json(indent=1) + "\n")
    machine.stamp(BESIDE)
    draw(found.lives)
    pages.put_section(pages.OPERATOR, section(found))
    claims.put(claim(found))


if __name__ == "__main__":
    main()
