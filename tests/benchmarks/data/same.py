"""Whether two stacks compute the same: otherwise their times must not be compared. Pure."""

from collections.abc import Sequence

from tests.benchmarks.agreement import TOLERANCE, LossesDiffer


def largest_difference(stack: str, values: Sequence[float], reference: str, expected: Sequence[float]) -> float:
    """Largest relative difference of two values. Raises LossesDiffer where it is more than TOLERANCE, and where one
    stack has more values than the other."""
    if len(values) != len(expected) or not values:
        raise LossesDiffer(f"{stack} has {len(values)} values, and {reference} has {len(expected)}")
    apart = 0.0
    for number, (value, other) in enumerate(zip(values, expected, strict=True)):
        difference = abs(value - other) / abs(other)
        if not difference <= TOLERANCE:  # as NaN is not
            raise LossesDiffer(
                f"{stack} has the value {value:.6f} at place {number}, but {reference} has {other:.6f}; find out which"
                " one computes something else"
            )
        apart = max(apart, difference)
    return apart


def check_equal(stack: str, digests: Sequence[int], reference: str, expected: Sequence[int]) -> None:
    """Raises LossesDiffer where two stacks have read different tokens."""
    if [*digests] != [*expected]:
        raise LossesDiffer(f"{stack} has read other tokens than {reference}: their times say nothing")
