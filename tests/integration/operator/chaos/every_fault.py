"""Every fault at every request of a job's life: `make test-chaos`. Its name keeps it out of the others: an hour."""

import pytest

from tests.integration.operator.chaos.faults import every_fault
from tests.integration.operator.chaos.lives import Lives

pytestmark = pytest.mark.integration


def test_a_job_ends_the_same_whatever_goes_wrong(lives: Lives) -> None:
    calm = lives.undisturbed()
    complaints = lives.complaints(list(every_fault(calm.counts)), calm)
    assert not complaints, "\n".join(complaints)
