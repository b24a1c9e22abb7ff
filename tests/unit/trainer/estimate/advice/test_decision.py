"""Seconds of candidates and decisions between them, computed by hand."""

import pytest
from pseudoreal_trainer.estimate.advice.candidates import Kind
from pseudoreal_trainer.estimate.advice.decision import Compared, Leg, decide, seconds, speed_up_in_seconds
from pseudoreal_trainer.estimate.advice.intervals import Interval

DELINKED = [Leg(0.3, seconds_per_token=1), Leg(1, seconds_per_token=4)]


@pytest.mark.parametrize(
    ("speed_up", "expected"),
    [
        (1, 30 * 1 + 70 * 4),
        (1.25, 30 * 1 + 50 * 4),  # 80 tokens
        (0.8, 30 * 1 + 95 * 4),  # 125 tokens
        (4, 25 * 1),  # 25 tokens: the loss is reached before the first stage ends
    ],
)
def test_seconds_are_those_of_as_many_tokens_as_reach_the_loss(speed_up: float, expected: float) -> None:
    assert seconds(DELINKED, 100, speed_up) == pytest.approx(expected)


def test_speed_up_in_seconds_is_taken_at_the_mean_and_at_both_ends() -> None:
    found = speed_up_in_seconds(DELINKED, 4, Interval(mean=1, low=0.8, high=1.25))
    assert found.mean == pytest.approx(400 / 310)
    assert found.low == pytest.approx(400 / 410)
    assert found.high == pytest.approx(400 / 230)


def test_arm_that_never_delinks_is_faster_by_the_ratio_of_the_steps() -> None:
    assert speed_up_in_seconds([Leg(1, 1)], 4, Interval(mean=0.4)).mean == pytest.approx(4 * 0.4)


def test_interval_that_reaches_no_tokens_at_all_has_the_lower_end_0() -> None:
    assert speed_up_in_seconds(DELINKED, 4, Interval(mean=1, low=-0.5, high=2.5)).low == 0


def compared(name: str, kind: Kind, mean: float, low: float | None = None, high: float | None = None) -> Compared:
    return Compared(name, kind, Interval(mean=mean, low=low, high=high))


SHARED = compared("shared", "Throughout", 0.5, 0.4, 0.6)
GROWN = compared("grown", "Growth", 1.0, 0.9, 1.1)


@pytest.mark.parametrize(
    ("candidates", "verdict", "name"),
    [
        pytest.param([], "NoEvidence", None, id="no candidates"),
        pytest.param([SHARED], "NoEvidence", None, id="a control alone"),
        pytest.param([Compared("d", "Sharing", None)], "NoEvidence", None, id="a candidate that does not fit"),
        pytest.param([compared("d", "Sharing", 1.2, 1.1, 1.3)], "Take", "d", id="above 1, without controls"),
        pytest.param([compared("d", "Sharing", 1.2, 1.0, 1.4)], "Level", None, id="a lower end of exactly 1"),
        pytest.param([compared("d", "Sharing", 1.1, 0.9, 1.3)], "Level", None, id="an interval around 1"),
        pytest.param([compared("d", "Sharing", 0.8, 0.7, 0.9)], "None", None, id="below 1"),
        pytest.param([compared("d", "Sharing", 3)], "Level", None, id="one seed"),
        pytest.param([compared("d", "Sharing", 0.5)], "Level", None, id="one seed, below 1"),
        pytest.param([SHARED, GROWN, compared("d", "Sharing", 1.2, 1.1, 1.3)], "Take", "d", id="above all controls"),
        pytest.param(
            [compared("shared", "Throughout", 1.2), compared("d", "Sharing", 1.3, 1.15, 1.4)],
            *("Take", "d"),
            id="above 1, around the mean of sharing throughout",
        ),
        pytest.param(
            [compared("shared", "Throughout", 1.5), compared("d", "Sharing", 1.2, 1.1, 1.3)],
            *("Take", "d"),
            id="above 1, below sharing throughout, which ends with a smaller model",
        ),
        pytest.param(
            [compared("grown", "Growth", 1.5), compared("d", "Sharing", 1.2, 1.1, 1.3)],
            *("Level", None),
            id="above 1, below a growth that one seed does not decide",
        ),
        pytest.param(
            [compared("grown", "Growth", 1.5, 1.4, 1.6), compared("d", "Sharing", 1.2, 1.1, 1.3)],
            *("Take", "grown"),
            id="growth is the control of sharing, and itself a candidate",
        ),
        pytest.param(
            [compared("grown", "Growth", 1.3, 1.2, 1.4), compared("other", "Growth", 1.5, 0.9, 2.1)],
            *("Take", "grown"),
            id="a growth is no control of another",
        ),
        pytest.param(
            [compared("shared", "Throughout", 1.25), compared("grown", "Growth", 1.3, 1.2, 1.4)],
            *("Take", "grown"),
            id="sharing throughout is no control of growth",
        ),
        pytest.param(
            [compared("a", "Sharing", 1.3, 1.05, 1.55), compared("b", "Sharing", 1.2, 1.1, 1.3)],
            *("Take", "b"),
            id="of two, the one with the larger lower end",
        ),
        pytest.param(
            [Compared("shared", "Throughout", None), compared("d", "Sharing", 1.2, 1.1, 1.3)],
            *("Take", "d"),
            id="a control that does not fit",
        ),
    ],
)
def test_decision(candidates: list[Compared], verdict: str, name: str | None) -> None:
    found = decide(candidates)
    assert (found.verdict, found.candidate) == (verdict, name)


@pytest.mark.parametrize(
    ("candidates", "words"),
    [
        ([SHARED, GROWN, compared("d", "Sharing", 1.2, 1.1, 1.3)], ["d, 1.20 (1.10 to 1.30)", "control, grown, 1.00"]),
        (
            [compared("d", "Sharing", 1.1, 0.9, 1.3)],
            ["d, 1.10 (0.90 to 1.30)", "the lower end of its speed-up is not above 1"],
        ),
        ([compared("d", "Sharing", 3)], ["3.00 (one seed, no interval)", "one seed decides nothing"]),
        ([compared("d", "Sharing", 0.8, 0.7, 0.9)], ["0.80 (0.70 to 0.90)", "upper end is below 1"]),
        (
            [compared("shared", "Throughout", 1.5), compared("d", "Sharing", 1.2, 1.1, 1.3)],
            [
                "1.20 (1.10 to 1.30)",
                "if a smaller model, with mostly a higher loss, will do: shared is 1.50 times as fast",
            ],
        ),
        (
            [compared("grown", "Growth", 1.5), compared("d", "Sharing", 1.6, 1.4, 1.8)],
            [
                "d, 1.60 (1.40 to 1.80)",
                "the lower end of its speed-up is not above the mean of its control grown, 1.50",
            ],
        ),
        ([Compared("d", "Sharing", None)], ["candidate (d) does not fit"]),
    ],
)
def test_decision_names_the_numbers_that_decided(candidates: list[Compared], words: list[str]) -> None:
    reason = decide(candidates).reason
    assert [word for word in words if word not in reason] == []
