"""Seconds of candidates, and the decision between them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pseudoreal_trainer.estimate.advice.candidates import Kind
from pseudoreal_trainer.estimate.advice.intervals import Interval

Verdict = Literal["Take", "Level", "None", "DoesNotFit", "NoEvidence"]
"""Take: the named candidate. Level: no candidate is known to be faster, and none to be no faster. None: train unshared,
no candidate is faster. DoesNotFit: the job's own model does not fit. NoEvidence: there is no candidate to compare."""


@dataclass(frozen=True)
class Leg:
    """A stage of a job: its end as a fraction of the tokens of unshared training, and the seconds of a token."""

    until: float
    seconds_per_token: float


def seconds(legs: Sequence[Leg], tokens: float, speed_up: float) -> float:
    """Return the seconds until a job has the loss that unshared training has after `tokens` tokens, with `speed_up` in
    tokens: it needs tokens / speed_up tokens, and the last leg has no other end."""
    needed, begin, total = 1 / speed_up, 0.0, 0.0
    for leg in legs:
        end = needed if leg is legs[-1] else min(leg.until, needed)
        total += (end - begin) * leg.seconds_per_token
        begin = end
    return total * tokens


def speed_up_in_seconds(legs: Sequence[Leg], real_seconds_per_token: float, in_tokens: Interval) -> Interval:
    """Return seconds of unshared training ÷ seconds of a candidate. A lower end that is not above 0 tokens stays 0."""

    def of(speed_up: float) -> float:
        return real_seconds_per_token / seconds(legs, 1, speed_up) if speed_up > 0 else 0.0

    low, high = (None if end is None else of(end) for end in (in_tokens.low, in_tokens.high))
    return Interval(mean=of(in_tokens.mean), low=low, high=high)


@dataclass(frozen=True)
class Compared:
    """A candidate beside unshared training."""

    name: str
    kind: Kind
    speed_up: Interval | None
    """Speed-up in seconds; None if a phase of the candidate does not fit."""
    is_extrapolation: bool = False
    """Whether the trial's size is so far from the job's that the interval is not known to hold for the job."""


@dataclass(frozen=True)
class Decision:
    verdict: Verdict
    candidate: str | None
    """Name of the recommended candidate; None: train unshared."""
    reason: str
    """A sentence with the numbers that decided."""


def decide(candidates: Sequence[Compared]) -> Decision:
    """Return the recommendation: unshared training, unless the lower end of a candidate's speed-up is above 1 and above
    the means of its controls (`controls_of`).

    Sharing throughout is no control. It ends with a smaller model, and mostly with a higher loss, so its speed-up is no
    reason against a candidate that ends with the job's model. The reason of the decision names it where it is faster.
    """
    fitting = [one for one in candidates if one.speed_up is not None]
    eligible = [one for one in fitting if one.kind != "Throughout"]
    if not eligible:
        return Decision("NoEvidence", None, _nothing_to_compare(candidates))
    winners = [one for one in eligible if _low(one) > max(1.0, _bar(one, fitting))]
    if winners:
        best = max(winners, key=_low)
        reason = f"{_figures(best)} the lower end of its speed-up is above 1{_above(best, fitting)}"
        return Decision("Take", best.name, reason + _smaller(best, fitting))
    open_ones = [one for one in eligible if not _is_refuted(one, fitting)]
    best = max(open_ones or eligible, key=_mean)
    if not open_ones:
        reason = f"the best of the candidates is {_figures(best)} {_why_not(best, fitting)}"
        return Decision("None", None, reason + _smaller(best, fitting))
    reason = f"the best of the candidates is {_figures(best)} {_why_open(best, fitting)}"
    return Decision("Level", None, reason + _smaller(best, fitting))


def controls_of(one: Compared, candidates: Sequence[Compared]) -> list[Compared]:
    """Return the controls that a candidate must beat: for a candidate that shares, each growth. Growth also ends with
    the job's model, so sharing must not be slower."""
    if one.kind != "Sharing":
        return []
    return [other for other in candidates if other.kind == "Growth" and other.speed_up is not None]


def _mean(one: Compared) -> float:
    assert one.speed_up is not None, "only candidates that fit are compared"
    return one.speed_up.mean


def _low(one: Compared) -> float:
    assert one.speed_up is not None, "only candidates that fit are compared"
    return 0.0 if one.speed_up.low is None else one.speed_up.low


def _best_control(one: Compared, fitting: Sequence[Compared]) -> Compared | None:
    return max(controls_of(one, fitting), key=_mean, default=None)


def _bar(one: Compared, fitting: Sequence[Compared]) -> float:
    control = _best_control(one, fitting)
    return 0.0 if control is None else _mean(control)


def _is_refuted(one: Compared, fitting: Sequence[Compared]) -> bool:
    """Return whether the upper end is below 1 or below the mean of a control."""
    assert one.speed_up is not None, "only candidates that fit are compared"
    return one.speed_up.high is not None and one.speed_up.high < max(1.0, _bar(one, fitting))


def _figures(one: Compared) -> str:
    assert one.speed_up is not None, "only candidates that fit are compared"
    if one.is_extrapolation:
        return (
            f"{one.name}, {one.speed_up.mean:.2f} times as fast as unshared training (no interval at the job's size);"
            " at the size of the trials"
        )
    return f"{one.name}, {interval_text(one.speed_up)} times as fast as unshared training;"


def interval_text(found: Interval, form: str = ".2f") -> str:
    """Return the mean with its interval, such as "1.32 (1.25 to 1.40)"."""
    if found.low is None or found.high is None:
        return f"{found.mean:{form}} (one seed, no interval)"
    return f"{found.mean:{form}} ({found.low:{form}} to {found.high:{form}})"


def _above(best: Compared, fitting: Sequence[Compared]) -> str:
    control = _best_control(best, fitting)
    return "" if control is None else f" and above the mean of its best control, {control.name}, {_mean(control):.2f}"


def _why_not(best: Compared, fitting: Sequence[Compared]) -> str:
    control = _best_control(best, fitting)
    if control is None or _mean(control) <= 1:
        return "its upper end is below 1"
    return f"the upper end of its speed-up is below the mean of its control {control.name}, {_mean(control):.2f}"


def _why_open(best: Compared, fitting: Sequence[Compared]) -> str:
    assert best.speed_up is not None, "only candidates that fit are compared"
    if best.speed_up.low is None:
        return "one seed decides nothing"
    control = _best_control(best, fitting)
    if best.speed_up.low <= 1 or control is None:
        return "the lower end of its speed-up is not above 1"
    return f"the lower end of its speed-up is not above the mean of its control {control.name}, {_mean(control):.2f}"


def _smaller(best: Compared, fitting: Sequence[Compared]) -> str:
    """Return an alternative that ends with a smaller model, if it is faster than unshared training and than `best`."""
    one = max((other for other in fitting if other.kind == "Throughout"), key=_mean, default=None)
    if one is None or _mean(one) <= max(1.0, _mean(best)):
        return ""
    return (
        f"; if a smaller model, with mostly a higher loss, will do: {one.name} is {_mean(one):.2f} times as fast to the"
        " loss that it ends with"
    )


def _nothing_to_compare(candidates: Sequence[Compared]) -> str:
    unfit = [one.name for one in candidates if one.speed_up is None and one.kind != "Throughout"]
    if unfit:
        return f"a phase of each candidate ({', '.join(unfit)}) does not fit"
    return "no trial of this kind of model has an arm that ends with the job's model and applies to it"
