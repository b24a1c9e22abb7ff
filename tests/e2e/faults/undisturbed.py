"""The required result of every job of these tests, despite all disturbances."""

from dataclasses import dataclass
from typing import Any

from tests.e2e.job import Job
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
    """A finished job: SHA-256 of the files of its last checkpoint, and reasons of its events."""

    files: dict[str, str]
    reasons: list[str]

    @classmethod
    def of(cls, job: Job) -> "Undisturbed":
        status = job.wait_for_end()
        assert status.state == "Complete", status
        assert (status.restarts, status.execution) == (0, 1), status
        return cls(job.final_files(), job.reasons())

    def check(self, job: Job, *extra: str) -> None:
        """Assert the success of `job` with exactly the same weights and moments, and with these additional events."""
        self.check_events(job, *extra)
        assert job.final_files() == self.files, "the weights differ"

    def check_events(self, job: Job, *extra: str) -> None:
        """Assert the success of `job` with these additional events."""
        status = job.wait_for_end()
        assert status.state == "Complete", status
        # Events come after the status.
        expected = sorted([*self.reasons, *extra])
        wait_for("the events", lambda: sorted(job.reasons()) == expected, job.reasons)
