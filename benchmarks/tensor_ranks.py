"""Times a step with tensor ranks beside torch's tensor parallelism: `python -m benchmarks.tensor_ranks`.

Two ranks cut all matrices and the vocabulary. The stacks run in turns, each in fresh processes, with the same weights
and batches; the losses are compared. Prints a line for each case.
"""

from statistics import quantiles

import click
from pseudoreal_dev.machine.progress import progress

from benchmarks import agreement, launch
from benchmarks.cases import MODELS, Case
from benchmarks.quiet import quiet_machine
from benchmarks.results import Run
from benchmarks.stacks.registry import OURS, TENSOR_PARALLEL, TORCH

_CASES = [
    Case(model=model, micro_batches=number, recompute=False)
    for model, number in (("tiny", 1), ("larger", 1), ("larger", 4), ("long", 1), ("hundred", 1))
]


@click.command(help=__doc__)
@click.option("--rounds", default=3, show_default=True, help="Runs of each stack and case.")
@click.option("--model", multiple=True, type=click.Choice([*MODELS]), help="Only cases of this model; repeatable.")
def main(rounds: int, model: tuple[str, ...]) -> None:
    with quiet_machine():
        for case in (case for case in _CASES if not model or case.model in model):
            _compare(case, rounds)


def _compare(case: Case, rounds: int) -> None:
    """Print the milliseconds of a step of each stack (median and quartiles), and torch's median divided by ours."""
    runs: list[Run] = []
    for number in range(rounds):
        for stack in TENSOR_PARALLEL:
            outcome = launch.run(stack, case)
            warm_up = MODELS[case.model].effort.warm_up
            run = Run(stack=stack, case=case, round=number, warm_up=warm_up, steps=outcome.steps)
            agreement.check(run, runs)
            runs.append(run)
    seconds = {name: [s for run in runs if run.stack == name for s in run.timed_seconds] for name in TENSOR_PARALLEL}
    found = {name: quantiles(timed, n=4) for name, timed in seconds.items()}
    texts = [f"{name} {1000 * q[1]:.0f} ms [{1000 * q[0]:.0f}-{1000 * q[2]:.0f}]" for name, q in found.items()]
    ratio = found[TORCH][1] / found[OURS][1]
    progress.note(f"{case.label}: {', '.join(texts)}; {ratio:.2f}x; loss {runs[-1].steps[-1].loss:.4f}")


if __name__ == "__main__":
    main()
