"""Every fault at every request of a job's life: `make test-chaos`. Its name keeps it out of the others: an hour."""

import pytest

from tests.integration.operator.chaos.faults import Fault, Kind, Target, every_fault
from tests.integration.operator.chaos.life import JOB
from tests.integration.operator.chaos.lives import Lives

pytestmark = pytest.mark.integration


def test_a_job_ends_the_same_whatever_goes_wrong(lives: Lives) -> None:
    calm = lives.undisturbed()
    complaints = lives.complaints(list(every_fault(calm.counts)), calm)
    assert not complaints, "\n".join(complaints)


def test_a_job_whose_release_is_refused_does_not_stay(lives: Lives) -> None:
    with lives.life("refused") as life:
        life.create()
        life.run_to_the_end()
        life.proxy.inject(Fault(Kind.ANSWER_409, Target.WRITE, life.proxy.counts[Target.WRITE] + 1))
        life.delete()
        assert life.proxy.struck.endswith(f"/pseudorealjobs/{JOB}")
        assert life.starts == 1
