"""SIGTERM ends the operator in time and with exit code 0, whatever it is doing."""

import pytest

from tests.integration.operator.chaos.support.faults import Fault, Kind, Target
from tests.integration.operator.chaos.support.lives import Lives
from tests.support.patience import wait_for

pytestmark = pytest.mark.integration

JOBS = 5


# The first request of all, the first of kopf, and two writes.
@pytest.mark.parametrize(
    ("target", "number"), [(Target.READ, 1), (Target.DISCOVERY, 1), (Target.WRITE, 1), (Target.WRITE, 3 * JOBS)]
)
def test_it_ends_while_jobs_run_and_a_request_hangs(lives: Lives, target: Target, number: int) -> None:
    with lives.life(f"hanging-{target}-{number}", Fault(Kind.HANG, target, number)) as life:
        for job in range(JOBS):
            life.cluster.create(f"job-{job}")
        life.operator.start()
        wait_for("the request that hangs", lambda: life.proxy.struck, life.explain)
        assert life.operator.stop() == 0
