from itertools import pairwise
from math import cos, pi
from typing import Any

import pytest
from pseudoreal_api.spec.optimizer import Optimizer
from pseudoreal_trainer.training.schedule import learning_rate, phase_rate


def _rates(schedule: str, warmup: int, total: int) -> list[float]:
    spec = Optimizer.model_validate(
        {"learningRate": "2e-3", "warmupSteps": warmup, "schedule": schedule, "finalFraction": "0.1"}
    )
    return [learning_rate(spec, step, total) for step in range(1, total + 1)]


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    assert _rates("Cosine", 10, 100)[:10] == pytest.approx([2e-3 * s / 10 for s in range(1, 11)], rel=1e-15)


@pytest.mark.parametrize(
    ("schedule", "middle"),
    [("Cosine", 2e-4 + 1.8e-3 * (1 + cos(pi / 2)) / 2), ("Linear", 1.1e-3), ("Constant", 2e-3)],
)
def test_decay_passes_through_its_middle_and_end(schedule: str, middle: float) -> None:
    rates = _rates(schedule, 20, 120)
    assert rates[70 - 1] == pytest.approx(middle, rel=1e-12)
    assert rates[-1] == pytest.approx(2e-3 if schedule == "Constant" else 2e-4, rel=1e-12)


@pytest.mark.parametrize("schedule", ["Cosine", "Linear"])
def test_no_step_changes_the_rate_by_much(schedule: str) -> None:
    """The schedule runs over all phases, so it has no jump where a phase ends."""
    rates = _rates(schedule, 20, 400)
    assert max(abs(b - a) for a, b in pairwise(rates[20:])) < 2e-3 * pi / 2 / 380
    assert rates[20:] == sorted(rates[20:], reverse=True)


def test_warmup_stable_decay_stays_at_the_peak_and_falls_in_its_last_part() -> None:
    """By default the decay takes a fifth of the steps after the warm-up."""
    rates = _rates("WarmupStableDecay", 20, 120)
    assert rates[20 - 1 : 100] == pytest.approx([2e-3] * 81, rel=1e-12)
    assert rates[110 - 1] == pytest.approx(1.1e-3, rel=1e-12)
    assert rates[-1] == pytest.approx(2e-4, rel=1e-12)


def test_no_warm_up_starts_below_or_at_the_peak() -> None:
    assert 0 < _rates("Cosine", 0, 10)[0] <= 2e-3


def test_after_a_delink_the_rate_rises_to_where_its_schedule_is(job_body: dict[str, Any], config: Any) -> None:
    job_body["spec"]["delink"] = {"warmupSteps": 4}
    pseudo, real = config(0), config(1)
    plain = [learning_rate(real.optimizer, step, 12) for step in range(1, 13)]
    assert [phase_rate(pseudo, step, 0) for step in range(1, 13)] == plain
    shares = [phase_rate(real, step, 6) / plain[step - 1] for step in range(7, 13)]
    assert shares == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
