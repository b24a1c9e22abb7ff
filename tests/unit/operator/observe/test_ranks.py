"""Ranks of each pod, and ranges of numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_api.status.status import NodeRanks, Placement
from pseudoreal_api.wire.reports import PodReport, RankReport
from pseudoreal_operator.observe.ranks import (
    first_ranks,
    numbers_of,
    ranges_text,
    recorded_first_ranks,
    reported_first_rank,
)
from pseudoreal_operator.observe.stages import Execution, StageKind

REAL = Execution("real", StageKind.TRAIN, 2)


@given(st.integers(1, 6), st.integers(1, 3), st.dictionaries(st.integers(-1, 7), st.integers(-2, 20), max_size=8))
def test_first_ranks_are_distinct_whatever_is_reported(workers: int, size: int, said: dict[int, int]) -> None:
    found = first_ranks(workers, size, said)
    assert found.keys() == set(range(workers))
    assert sorted(found.values()) == [*range(0, workers * size, size)]


def test_reported_first_ranks_are_kept_and_the_rest_are_filled() -> None:
    assert first_ranks(4, 2, {}) == {0: 0, 1: 2, 2: 4, 3: 6}
    assert first_ranks(4, 2, {1: 6, 3: 2}) == {1: 6, 3: 2, 0: 0, 2: 4}
    assert first_ranks(2, 2, {0: 1}) == {0: 0, 1: 2}, "no pod begins at rank 1"


def test_first_rank_is_found_from_any_reporting_rank() -> None:
    def report(*ranks: int) -> PodReport:
        return PodReport(ranks=[RankReport(rank=rank, activity="starting", seconds=0, step=0) for rank in ranks])

    assert reported_first_rank(report(7, 6), 4) == 4
    assert reported_first_rank(report(), 4) is None


@given(st.lists(st.integers(0, 30), unique=True))
def test_ranges_keep_the_order_of_numbers(numbers: list[int]) -> None:
    assert [*numbers_of(ranges_text(numbers))] == numbers


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2, 3], "0-3"), ([0, 1, 5, 6, 7, 2], "0-1,5-7,2"), ([2, 1, 0], "2,1,0")],
)
def test_ranges_are_short(numbers: list[int], text: str) -> None:
    assert ranges_text(numbers) == text


def test_recorded_first_ranks_are_of_one_execution() -> None:
    placement = Placement(
        phase_name="real",
        execution=2,
        nodes=[NodeRanks(node="a", ranks="0-3", workers="0,2"), NodeRanks(node="b", ranks="4-5,8-9", workers="1,4")],
    )
    assert recorded_first_ranks(placement, REAL) == {0: 0, 2: 2, 1: 4, 4: 8}
    assert recorded_first_ranks(placement, Execution("real", StageKind.TRAIN, 3)) == {}
    assert recorded_first_ranks(None, REAL) == {}


def test_malformed_ranges_are_ignored() -> None:
    strange = Placement(phase_name="real", execution=2, nodes=[NodeRanks(node="a", ranks="0-x,7", workers="0-1")])
    assert recorded_first_ranks(strange, REAL) == {}
