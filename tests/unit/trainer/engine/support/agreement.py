"""Comparison of training by the engine with training by the plain reference."""

import pytest

from tests.unit.trainer.engine.support import reference
from tests.unit.trainer.engine.support.cases import STEPS, Case
from tests.unit.trainer.engine.support.running import Result


def assert_trained_alike(found: Result, case: Case) -> None:
    """Assert that the losses and weights of the engine agree with the reference, in float64."""
    losses, weights = reference.train(case)
    assert len(found.losses) == STEPS
    assert found.losses == pytest.approx(losses, rel=1e-12, abs=1e-12)
    assert losses[-1] != losses[0], "training has changed the loss"
    found.assert_weights(weights)
