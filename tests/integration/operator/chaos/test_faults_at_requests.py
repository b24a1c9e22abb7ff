"""A job ends the same, without duplicate children or lost events, for any fault of a single request."""

import pytest

from tests.integration.operator.chaos.support.faults import every_fault, sample
from tests.integration.operator.chaos.support.lives import Lives

pytestmark = pytest.mark.integration


def test_a_job_ends_the_same_after_some_of_the_faults(lives: Lives) -> None:
    calm = lives.undisturbed()
    end = calm.story.end
    assert (end["state"], end["execution"], end["restarts"]) == ("Complete", 1, 0)
    assert {count for (kind, _), count in calm.story.created.items() if kind != "Event"} == {1}
    complaints = lives.complaints(list(sample(calm.counts)), calm)
    assert not complaints, "\n".join(complaints)


@pytest.mark.long
def test_a_job_ends_the_same_after_every_fault_at_every_request(lives: Lives) -> None:
    """Takes an hour: `make test-chaos` shows the progress."""
    calm = lives.undisturbed()
    complaints = lives.complaints(list(every_fault(calm.counts)), calm)
    assert not complaints, "\n".join(complaints)
