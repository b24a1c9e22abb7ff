"""Schedule estimate of a job: days from the predicted step times, and the changes needed to end in time. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

_DAY = 86_400
"""Seconds in a day."""


@dataclass(frozen=True)
class PhaseDuration:
    name: str
    steps: int
    tokens_per_step: int
    step_seconds: float
    bottleneck: str

    @property
    def days(self) -> float:
        return self.steps * self.step_seconds / _DAY


def total_days(durations: Sequence[PhaseDuration]) -> float:
    return sum(course.days for course in durations)


def changes_to_end_within(durations: Sequence[PhaseDuration], days: float) -> list[str]:
    """Return sentences on how the job could end within this many days: with a shorter last phase or with faster steps,
    and the bottleneck of the slowest phase. One sentence if the job already ends in time."""
    needed = total_days(durations)
    if needed <= days:
        return [f"the job takes {needed:.3g} days, within {days:g}"]
    *before, last = durations
    left = days - total_days(before)
    shorter = [_shorter(last, left)] if left > 0 else [f"the phases before {last.name} take {-left:.3g} days too many"]
    slowest = max(durations, key=lambda course: course.days)
    return [
        f"the job takes {needed:.3g} days, {needed / days:.3g} times {days:g}",
        *shorter,
        f"or make steps {needed / days:.3g} times as fast; most of the time is spent in phase {slowest.name}, where"
        f" {slowest.bottleneck}",
    ]


def _shorter(last: PhaseDuration, days: float) -> str:
    steps = int(days * _DAY / last.step_seconds)
    return (
        f"to end in time, let phase {last.name} have {steps:,} steps instead of {last.steps:,}:"
        f" {steps * last.tokens_per_step:,} tokens"
    )
