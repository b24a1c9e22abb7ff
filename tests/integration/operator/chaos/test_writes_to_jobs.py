"""The operator writes only the status of a job. A deleted and recreated job is treated as another job."""

import pytest

from tests.integration.operator.chaos.support.faults import Fault, Kind, Target
from tests.integration.operator.chaos.support.life import JOB, Life
from tests.integration.operator.chaos.support.lives import Lives

pytestmark = pytest.mark.integration


def test_only_the_status_of_a_job_is_written_in_a_whole_life(lives: Lives) -> None:
    with lives.life("unmarked") as life:
        life.create()
        life.run_to_the_end()
        assert not life.job.body["metadata"].keys() & {"finalizers", "annotations"}
        life.delete()
        assert _written(life) == {"status"}


def test_a_job_created_anew_is_not_taken_for_the_old_one(lives: Lives) -> None:
    with lives.life("created-anew", Fault(Kind.DELAY, Target.STATUS, 2)) as life:
        life.create()
        life.until("the late write", lambda: life.proxy.struck.endswith("/status"))
        life.cluster.delete_job(JOB)
        assert life.cluster.find(JOB) is None, "nothing held it"
        life.create()
        life.run_to_the_end()
        assert (life.job.status.execution, life.job.status.restarts) == (1, 0)


def _written(life: Life) -> set[str]:
    """Return the written subresources of the job; "" for the job itself."""
    writes = (e.path.split("/pseudorealjobs/") for e in life.proxy.exchanges if e.method not in ("GET", "POST"))
    return {parts[1].partition("/")[2] for parts in writes if len(parts) > 1}
