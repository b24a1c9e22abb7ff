"""Comparison of training by the engine with training by the plain reference."""

from collections.abc import Mapping

import pytest

from tests.unit.trainer.engine.support import reference
from tests.unit.trainer.engine.support.cases import Case
from tests.unit.trainer.engine.support.running import Result, sound


def assert_trained_alike(found: Result, case: Case) -> None:
    """Assert that the losses and weights of the engine agree with the reference, in float64."""
    losses, weights = reference.train(case)
    assert len(found.losses) == case.steps
    assert found.losses == pytest.approx(losses, rel=1e-12, abs=1e-12)
    assert losses[-1] != losses[0], "training has changed the loss"
    found.assert_weights(weights)


def assert_evaluated_alike(found: Mapping[Case, list[Result]], case: Case) -> None:
    """Assert that the losses of an evaluation, summed over the ranks, agree with the reference with the same
    weights."""
    expected = reference.evaluate(case, sound(found, case).weights)
    assert sum(result.evaluation for result in found[case]) == pytest.approx(expected, rel=1e-12)


def assert_written_alike(found: Mapping[Case, list[Result]], case: Case) -> None:
    """Assert that each rank's text is the text of a plain model with the same weights."""
    expected = reference.write(case, found[case][0].weights)
    assert all(result.written == expected for result in found[case])
