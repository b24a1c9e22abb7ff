"""The schedule estimate of a job, and the changes that would meet a deadline, computed by hand."""

import pytest
from pseudoreal_trainer.estimate.schedule import PhaseDuration, changes_to_end_within, total_days

PSEUDO = PhaseDuration("pseudo", steps=8640, tokens_per_step=100, step_seconds=10.0, bottleneck="passes take 90%")
REAL = PhaseDuration("real", steps=8640, tokens_per_step=100, step_seconds=30.0, bottleneck="updates take 80%")


def test_days_are_the_sum_over_all_steps() -> None:
    assert PSEUDO.days == 1
    assert total_days([PSEUDO, REAL]) == pytest.approx(4)


def test_job_that_ends_in_time_needs_no_change() -> None:
    assert changes_to_end_within([PSEUDO, REAL], 5) == ["the job takes 4 days, within 5"]


def test_late_job_needs_a_shorter_last_phase_or_faster_steps() -> None:
    says, shorter, faster = changes_to_end_within([PSEUDO, REAL], 2)
    assert says == "the job takes 4 days, 2 times 2"
    assert "let phase real have 2,880 steps instead of 8,640: 288,000 tokens" in shorter
    assert "2 times as fast" in faster
    assert faster.endswith("most of the time is spent in phase real, where updates take 80%")


def test_late_job_names_earlier_phases_that_take_too_long() -> None:
    _, too_long, _ = changes_to_end_within([PSEUDO, REAL], 0.5)
    assert too_long == "the phases before real take 0.5 days too many"
