"""The required result of every job of these tests, despite all disturbances."""

from dataclasses import dataclass
from typing import Any

import pytest
from pseudoreal_api.status.status import PseudoRealJobStatus

from tests.e2e.support.job import Job
from tests.support.patience import wait_for

SPEC: dict[str, Any] = {
    "spec__phases__0__until__step": 90,
    "spec__phases__1__until__step": 180,
    "spec__checkpoint__everySteps": 15,
    "spec__restart": {"backoffSeconds": 1},
    "spec__pod": {"terminationGracePeriodSeconds": 20},
}
"""Spec changes of all jobs: they train the same model on the same text in the same order. Tests change nothing with
influence on the weights."""
REAL = 90
"""First step of the real phase."""


@dataclass(frozen=True)
class Undisturbed:
    """A finished job: SHA-256 of the files of its last checkpoint, reasons of its events, and its last loss."""

    files: dict[str, str]
    reasons: list[str]
    loss: float

    @classmethod
    def of(cls, job: Job) -> "Undisturbed":
        status = job.wait_for_end()
        assert status.state == "Complete", status
        assert (status.restarts, status.execution) == (0, 1), status
        return cls(job.final_files(), job.reasons(), _last_loss(status))

    def check(self, job: Job, *extra: str) -> None:
        """Assert the success of `job` with exactly the same weights and moments, and with these additional events."""
        self.check_events(job, *extra)
        assert job.final_files() == self.files, "the weights and moments are equal"

    def check_loss(self, job: Job, *extra: str) -> None:
        """Assert the success of `job` with these additional events and the same loss up to rounding: another release
        of the trainer may round otherwise."""
        self.check_events(job, *extra)
        assert _last_loss(job.status()) == pytest.approx(self.loss, rel=2e-3)

    def check_events(self, job: Job, *extra: str) -> None:
        """Assert the success of `job` with these additional events."""
        status = job.wait_for_end()
        assert status.state == "Complete", status
        # Wait: events are posted after the status.
        expected = sorted([*self.reasons, *extra])
        wait_for("the events", lambda: sorted(job.reasons()) == expected, job.reasons)


def _last_loss(status: PseudoRealJobStatus) -> float:
    loss = status.phases[-1].loss
    assert loss is not None, "the last phase is done"
    return float(loss)
