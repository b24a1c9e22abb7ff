"""What every job of these tests must come to, whatever happens to it."""

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
"""All jobs train the same model on the same text in the same order: tests change nothing that weights depend on."""
REAL = 90
"""The step at which the real phase begins."""


@dataclass(frozen=True)
class Undisturbed:
    """A finished job: the files of its last checkpoint by their SHA-256, and the reasons of its events."""

    files: dict[str, str]
    reasons: list[str]

    @classmethod
    def of(cls, job: Job) -> "Undisturbed":
        status = job.wait_for_end()
        assert status.state == "Complete", status
        assert (status.restarts, status.execution) == (0, 1), status
        return cls(job.final_files(), job.reasons())

    def check(self, job: Job, *extra: str) -> None:
        """`job` ends with the very same weights and moments, and has had these events more."""
        self.check_events(job, *extra)
        assert job.final_files() == self.files, "the weights differ"

    def check_events(self, job: Job, *extra: str) -> None:
        """`job` succeeds, and has had these events more."""
        status = job.wait_for_end()
        assert status.state == "Complete", status
        # Events come after the status.
        expected = sorted([*self.reasons, *extra])
        wait_for("the events", lambda: sorted(job.reasons()) == expected, job.reasons)
