"""Configurations for pods that join one rendezvous."""

from collections.abc import Callable
from typing import Any

import pytest
from pseudoreal_api.resolved.config import PhaseConfig

from tests.unit.trainer.runtime.support.pods import STEPS


@pytest.fixture
def pair(job_body: dict[str, Any], config: Any) -> Callable[..., PhaseConfig]:
    """Return a function that makes the configuration of a phase on two pods."""
    phase = job_body["spec"]["phases"][0]
    phase |= {"workers": 2, "processesPerWorker": 1, "until": {"step": STEPS}}

    def make(work: str = "work", in_place: int = 2) -> PhaseConfig:
        made: PhaseConfig = config(0, work).model_copy(update={"in_place": in_place})
        return made

    return make
