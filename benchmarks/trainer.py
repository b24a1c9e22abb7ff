"""Times the training step of each stack, side by side: `python -m benchmarks.trainer`.

The runs of a case follow each other in every round, so that a machine that becomes slower affects all stacks.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import click
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_dev.machine.progress import progress

from benchmarks import agreement, launch, machine
from benchmarks.cases import MODELS, Case, all_cases
from benchmarks.quiet import quiet_machine
from benchmarks.results import PARTIAL, TRAINER, Results, Run, write
from benchmarks.stacks.registry import STACKS
from benchmarks.summary import COUNTERPARTS

Planned = tuple[int, Case, str]
"""Round, case, stack."""


@click.command(help=__doc__)
@click.option("--only", default="", help="Runs whose 'stack: case' has this regular expression in it; in one round.")
def main(only: str) -> None:
    try:
        with quiet_machine():
            run_all(planned(only), PARTIAL if only else TRAINER)
    except (DevError, agreement.LossesDiffer) as error:
        progress.console.print(str(error), style="red", markup=False)
        sys.exit(1)


def planned(only: str) -> list[Planned]:
    """Return all runs in their order."""
    return [
        (number, case, stack)
        for model in MODELS
        for number in range(1 if only else MODELS[model].effort.rounds)
        for case in all_cases()
        for stack in STACKS
        if case.model == model and re.search(only, f"{stack}: {case.label}")
    ]


def run_all(plan: Sequence[Planned], path: Path) -> None:
    """Run everything. The results are written after each run, so that measurements survive an interruption."""
    described, runs = machine.describe(), list[Run]()
    for place, (number, case, stack) in enumerate(plan, start=1):
        with progress.step(f"[{place}/{len(plan)}] {case.label}: {stack}", log=launch.LOG):
            outcome = launch.run(stack, case)
            if outcome.crashed_at_end and stack not in COUNTERPARTS:
                raise DevError(f"{stack} crashed after its last step: the end of {launch.LOG} says where")
            run = Run(
                stack=stack,
                case=case,
                round=number,
                warm_up=MODELS[case.model].effort.warm_up,
                steps=outcome.steps,
                crashed_at_end=outcome.crashed_at_end,
            )
        progress.note(f"    {1000 * median(run.timed_seconds):.0f} ms, loss {run.steps[-1].loss:.4f}")
        agreement.check(run, runs)
        runs.append(run)
        write(Results(machine=described, runs=runs), path)


if __name__ == "__main__":
    main()
