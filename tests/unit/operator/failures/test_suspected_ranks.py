"""Ranks that are named when training hangs, or is slow."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_api.wire.reports import RankReport
from pseudoreal_operator.failures.hang import stragglers, suspected_ranks


def _sign(rank: int, activity: str = "waiting", seconds: float = 99.0, step: int = 7, **more: Any) -> RankReport:
    return RankReport.model_validate({"rank": rank, "activity": activity, "seconds": seconds, "step": step, **more})


def _ranks(*activities: str, **more: list[Any]) -> list[RankReport]:
    return [
        _sign(rank, activity, **{key: values[rank] for key, values in more.items()})
        for rank, activity in enumerate(activities)
    ]


CASES: dict[str, tuple[list[RankReport], list[int]]] = {
    "stuck in its own work": (_ranks("waiting", "computing", "waiting"), [1]),
    "an import that hangs": (_ranks("waiting", "waiting", "starting", step=[0, 0, 0]), [2]),
    "the longest first": (_ranks("computing", "computing", "waiting", seconds=[3.0, 90.0, 90.0]), [1, 0]),
    "stopped in a collective": (_ranks("waiting", "waiting", "waiting", process=["S", "T", "S"]), [1]),
    "stopped in its own work": (_ranks("waiting", "computing", "waiting", process=["S", "S", "T"]), [2]),
    "killed": (_ranks("waiting", "computing", process=["X", "R"]), [0]),
    "one step behind": (_ranks("waiting", "waiting", "waiting", step=[8, 8, 7]), [2]),
    "two of three are a step behind": (_ranks("waiting", "waiting", "waiting", step=[7, 8, 7]), []),
    "one of two is a step behind": (_ranks("waiting", "waiting", step=[7, 8]), []),
    "all in one step": (_ranks("waiting", "waiting", "waiting"), []),
    "nobody waits": (_ranks("computing", "computing"), []),
    "one has ended, and was reaped": (_ranks("ended", "waiting", "waiting", process=["X", "S", "S"]), []),
    "nobody at all": ([], []),
    "alone": (_ranks("computing"), []),
}


@pytest.mark.parametrize("name", CASES)
def test_suspected_ranks_are_in_order(name: str) -> None:
    signs, expected = CASES[name]
    assert suspected_ranks(signs) == expected


_SIGNS = st.lists(
    st.builds(
        RankReport,
        rank=st.integers(0, 99),
        activity=st.sampled_from(["starting", "computing", "waiting", "ended"]),
        seconds=st.floats(0, 1e6),
        step=st.integers(0, 3),
        busy_seconds=st.none() | st.floats(0, 1e3, allow_subnormal=False),
        process=st.sampled_from(["", "R", "S", "D", "T", "Z", "X"]),
    ),
    max_size=8,
    unique_by=lambda sign: sign.rank,
)


@given(_SIGNS)
def test_suspected_ranks_are_a_proper_subset(signs: list[RankReport]) -> None:
    named, by_rank = suspected_ranks(signs), {sign.rank: sign for sign in signs}
    assert len(set(named)) == len(named)
    found = [by_rank[rank] for rank in named]
    assert all(sign.activity != "ended" for sign in found)
    halted = {sign.rank for sign in signs if sign.process in ("T", "Z", "X") and sign.activity != "ended"}
    if halted:
        assert set(named) == halted
        return
    running = [sign for sign in signs if sign.activity != "ended"]
    assert len(named) < max(1, len(running)), "the others wait for them: there are others"
    if any(sign.activity == "waiting" for sign in running) and any(sign.activity != "waiting" for sign in running):
        assert all(sign.activity != "waiting" for sign in found)


@given(_SIGNS, st.randoms())
def test_the_order_in_which_pods_report_does_not_matter(signs: list[RankReport], random: Any) -> None:
    shuffled = random.sample(signs, len(signs))
    assert set(suspected_ranks(shuffled)) == set(suspected_ranks(signs))
    assert set(stragglers(shuffled, 3.0)) == set(stragglers(signs, 3.0))


def _busy(*seconds: float | None) -> list[RankReport]:
    return [_sign(rank, busy_seconds=value) for rank, value in enumerate(seconds)]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((1.0, 1.0, 10.0), [(2, 10.0)]),
        ((1.0, 1.0, 2.9), []),
        ((2.0, 20.0), [(1, 10.0)]),
        ((1.0, None, 10.0, 1.0), [(2, 10.0)]),
        ((1.0, 4.0, 1.0, 8.0, 1.0), [(3, 8.0), (1, 4.0)]),
        ((10.0, None, None), []),
        ((0.0, 5.0), []),
        ((), []),
    ],
)
def test_stragglers_are_found_with_their_multiple(
    seconds: tuple[float | None, ...], expected: list[tuple[int, float]]
) -> None:
    assert stragglers(_busy(*seconds), 3.0) == expected


@given(_SIGNS, st.floats(1.1, 10.0))
def test_stragglers_are_sorted_and_above_the_factor(signs: list[RankReport], factor: float) -> None:
    found = stragglers(signs, factor)
    assert 2 * len(found) <= len(signs), "most ranks are as the median is"
    assert [ratio for _, ratio in found] == sorted((ratio for _, ratio in found), reverse=True)
    assert all(ratio >= factor * 0.999 for _, ratio in found)
    assert {rank for rank, _ in stragglers(signs, factor * 2)} <= {rank for rank, _ in found}
