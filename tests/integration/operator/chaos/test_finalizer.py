"""kopf's own writes to a job: one patch that adds the finalizer, and one that takes it off."""

import pytest
from pseudoreal_operator.cluster.finalizer import FINALIZER

from tests.integration.operator.chaos.faults import Fault, Kind, Target
from tests.integration.operator.chaos.life import JOB, Life
from tests.integration.operator.chaos.lives import Lives

pytestmark = pytest.mark.integration


def test_the_finalizer_takes_two_patches_in_a_whole_life(lives: Lives) -> None:
    with lives.life("finalizer") as life:
        life.create()
        life.run_to_the_end()
        metadata = life.job.body["metadata"]
        assert (metadata["finalizers"], metadata.get("annotations")) == ([FINALIZER], None)
        assert _patches(life) == 1
        life.delete()
        assert _patches(life) == 2


def test_a_job_created_anew_is_not_taken_for_one_that_never_had_the_finalizer(lives: Lives) -> None:
    without_finalizer, late = Fault(Kind.HANG, Target.WRITE, 1), Fault(Kind.DELAY, Target.STATUS, 2)
    with lives.life("created-anew", without_finalizer, late) as life:
        life.create()
        life.until("the late write", lambda: life.proxy.struck.endswith("/status"))
        life.cluster.delete_job(JOB)
        assert life.cluster.find(JOB) is None, "nothing held it"
        life.create()
        life.run_to_the_end()
        assert (life.job.status.execution_attempt, life.job.status.restarts) == (1, 0)


def _patches(life: Life) -> int:
    return sum(e.method == "PATCH" and e.path.endswith(f"/pseudorealjobs/{JOB}") for e in life.proxy.exchanges)
