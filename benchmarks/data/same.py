"""Check that two stacks compute the same; otherwise their times must not be compared. Pure."""

from collections.abc import Sequence

from benchmarks.agreement import TOLERANCE, LossesDiffer


def largest_difference(stack: str, values: Sequence[float], reference: str, expected: Sequence[float]) -> float:
    """Return the largest relative difference of two values. Raises LossesDiffer if it exceeds TOLERANCE, or if the
    stacks have different numbers of values."""
    if len(values) != len(expected) or not values:
        raise LossesDiffer(f"{stack} has {len(values)} values, and {reference} has {len(expected)}")
    apart = 0.0
    for number, (value, other) in enumerate(zip(values, expected, strict=True)):
        difference = abs(value - other) / abs(other)
        if not difference <= TOLERANCE:  # also raises for NaN
            raise LossesDiffer(
                f"{stack} has the value {value:.6f} at place {number}, but {reference} has {other:.6f}; find out which"
                " one computes something else"
            )
        apart = max(apart, difference)
    return apart


def check_equal(stack: str, digests: Sequence[int], reference: str, expected: Sequence[int]) -> None:
    """Raise LossesDiffer if two stacks have read different tokens."""
    if [*digests] != [*expected]:
        raise LossesDiffer(f"{stack} has read other tokens than {reference}: their times say nothing")
