"""Check that all stacks train the same model: the losses do not depend on the stack, on the number of micro-batches, or
on recomputation. Pure."""

from collections.abc import Iterable

from benchmarks.results import Run

TOLERANCE = 5e-5
"""Relative difference of two losses: half a unit of the fourth digit. Stacks sum float32 numbers in different
orders."""


class LossesDiffer(Exception):
    """Two stacks compute different things, so their times must not be compared."""


def check(run: Run, earlier: Iterable[Run]) -> None:
    """Raise LossesDiffer unless `run` has the losses of the first earlier run of its model and batch."""
    reference = next((other for other in earlier if _trains_the_same(other, run)), run)
    for number, (step, expected) in enumerate(zip(run.steps, reference.steps, strict=True)):
        if not abs(step.loss - expected.loss) <= TOLERANCE * expected.loss:
            raise LossesDiffer(
                f"{run.stack} ({run.case.label}) has the loss {step.loss:.6f} in step {number}, but {reference.stack}"
                f" ({reference.case.label}) has {expected.loss:.6f}; find out which one trains something else"
            )


def _trains_the_same(one: Run, other: Run) -> bool:
    return (one.case.model, one.case.sequences) == (other.case.model, other.case.sequences)
