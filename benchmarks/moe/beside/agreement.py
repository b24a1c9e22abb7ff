"""Check that all stacks train the same mixture: equal losses in each step. Pure."""

from collections.abc import Iterable, Mapping

from benchmarks.agreement import LossesDiffer
from benchmarks.moe.beside.cases import Compute
from benchmarks.moe.results import Run

TOLERANCES: Mapping[Compute, float] = {"float32": 5e-5, "bfloat16": 5e-3}
"""Relative difference of two losses. In bfloat16 two experts may tie for a token, and DeepSpeed's gradients are
bfloat16, too."""


def check(run: Run, earlier: Iterable[Run]) -> None:
    """Raise LossesDiffer unless `run` has the losses of the first earlier run with the same experts and dtype. A failed
    run has no losses."""
    for other in earlier:
        if run.steps and other.steps and _trains_the_same(run, other):
            _compare(run, other)
            return


def furthest(runs: Iterable[Run], compute: Compute) -> float:
    """Return the largest relative difference of two losses of one step."""
    losses = dict[tuple[int, int], list[float]]()
    for run in runs:
        if run.case.compute == compute:
            for number, step in enumerate(run.steps):
                losses.setdefault((run.case.experts, number), []).append(step.loss)
    return max(max(each) / min(each) - 1 for each in losses.values())


def _compare(run: Run, other: Run) -> None:
    for number, (step, expected) in enumerate(zip(run.steps, other.steps, strict=True)):
        if not abs(step.loss - expected.loss) <= TOLERANCES[run.case.compute] * expected.loss:
            raise LossesDiffer(
                f"{run.stack} ({run.case.label}, {run.case.compute}) has the loss {step.loss:.6f} in step {number}, but"
                f" {other.stack} has {expected.loss:.6f}; find out which one trains something else"
            )


def _trains_the_same(one: Run, other: Run) -> bool:
    return (one.case.experts, one.case.compute) == (other.case.experts, other.case.compute)
