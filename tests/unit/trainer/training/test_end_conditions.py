"""When a phase ends, and which of its steps are measured for `delink.optimizerState: Measured`."""

from typing import Any

import pytest
from pseudoreal_trainer.engine.gradient_similarity import LayerGradients
from pseudoreal_trainer.training.progress import Progress
from pseudoreal_trainer.training.schedule import EndConditions

MEASURED = {"optimizerState": "Measured", "measuredSteps": 3}


@pytest.fixture
def rules(job_body: dict[str, Any], config: Any) -> Any:
    def make(until: dict[str, Any], delink: dict[str, Any] | None = None, phase: int = 0) -> EndConditions:
        job_body["spec"]["phases"][phase]["until"] = until
        job_body["spec"]["delink"] = delink or {}
        return EndConditions(config(phase))

    return make


def _at(step: int, **more: Any) -> Progress:
    """Return the progress after `step` steps of 96 tokens."""
    return Progress(step=step, tokens=96 * step, **more)


def _measured_steps(rules: EndConditions, last: int = 12) -> list[int]:
    return [step + 1 for step in range(last) if rules.measures(_at(step)) and not rules.is_over(_at(step))]


@pytest.mark.parametrize(("until", "end"), [({"step": 6}, 6), ({"tokens": 480}, 5), ({"step": 6, "tokens": 400}, 5)])
def test_the_first_bound_reached_ends_the_phase(rules: Any, until: dict[str, Any], end: int) -> None:
    found = rules(until)
    assert [found.is_over(_at(step)) for step in (end - 1, end, end + 1)] == [False, True, True]


@pytest.mark.parametrize(
    ("until", "steps"), [({"step": 6}, [4, 5, 6]), ({"tokens": 960}, [8, 9, 10]), ({"step": 2}, [1, 2])]
)
def test_the_last_steps_of_a_phase_are_measured(rules: Any, until: dict[str, Any], steps: list[int]) -> None:
    assert _measured_steps(rules(until, MEASURED)) == steps


def test_nothing_is_measured_for_another_policy_or_in_the_last_phase(rules: Any) -> None:
    assert not _measured_steps(rules({"step": 6}, {"optimizerState": "Scale"}))
    assert not _measured_steps(rules({"step": 6}, MEASURED, phase=1))


def test_a_reached_loss_ends_the_phase_at_once_or_after_the_measured_steps(rules: Any) -> None:
    until = {"step": 100, "validationLoss": "2.0"}
    plain, measuring = rules(until), rules(until, MEASURED)
    reached = {"validation_loss": 1.9}
    assert plain.is_over(_at(7, ending=plain.after_loss(_at(7, **reached))))
    progress = _at(7, **reached)
    for step in (7, 8, 9):
        progress.step, progress.ending = step, measuring.after_loss(progress)
        assert progress.ending.step == 10
        assert not measuring.is_over(progress)
        assert measuring.measures(progress)
    progress.step = 10
    assert measuring.is_over(progress)
    assert measuring.after_loss(_at(7, validation_loss=2.1)).step is None


def test_more_than_half_of_the_layers_must_differ_in_checks_in_a_row(rules: Any) -> None:
    found = rules({"step": 100, "gradientCorrelation": {"below": "0.5", "everySteps": 4, "checks": 2}})
    assert [step + 1 for step in range(12) if found.checks(_at(step))] == [4, 8, 12]
    met, unmet, half = (0.1, 0.4, 0.9), (0.1, 0.6, 0.9), (0.1, 0.2, 0.6, 0.7)
    progress = _at(4)
    for correlations, checks in ((met, 1), (unmet, 0), (met, 1), (half, 0), (met, 1)):
        progress.ending = found.after_check(progress, correlations)
        assert progress.ending.checks == checks
        assert not found.is_over(progress)
    progress.ending = found.after_check(progress, met)
    assert found.is_over(progress)


def test_measured_squares_are_summed_over_steps(rules: Any) -> None:
    found = rules({"step": 6}, MEASURED)
    progress = _at(4)
    for shared, single in (([8.0, 1.0], [1.0, 0.5]), ([4.0, 2.0], [2.0, 0.5])):
        progress.measurement = found.after_measuring(progress, LayerGradients({"a": shared}, {"a": single}, ()))
    measured = progress.measurement
    assert measured is not None
    assert (measured.steps, measured.shared, measured.single) == (2, {"a": [12, 3]}, {"a": [3, 1]})
    assert measured.next_sharing.blocks == 4
