"""Jobs that nothing happens to cost no requests."""

import time

import pytest

from tests.integration.operator.chaos.lives import Lives
from tests.patience import wait_for

pytestmark = pytest.mark.integration

JOBS = 5
QUIET_SECONDS = 6.0
"""Longer than the operator once needed to look at each of them."""


def test_suspended_and_ended_jobs_are_not_looked_at_not_even_by_a_new_operator_if_they_ended(lives: Lives) -> None:
    with lives.life("quiet") as life:
        life.create()
        life.run_to_the_end()
        suspended = [life.cluster.create(f"suspended-{number}", spec__suspend=True) for number in range(JOBS)]
        for job in suspended:
            job.wait("the suspension", lambda status: status.phase == "Suspended")
            wait_for("its events", lambda job=job: "Suspended" in job.reasons())
        wait_for("the last event", lambda: "Succeeded" in life.job.reasons())
        asked = len(life.proxy.exchanges)
        time.sleep(QUIET_SECONDS)
        assert [str(exchange) for exchange in life.proxy.exchanges[asked:] if not exchange.is_watch] == []

        life.operator.kill()
        asked = len(life.proxy.exchanges)
        life.operator.start()
        for job in suspended:
            wait_for("a look", lambda job=job: any(e.path.endswith(job.name) for e in life.proxy.exchanges[asked:]))
        assert not any(e.path.endswith(f"/pseudorealjobs/{life.job.name}") for e in life.proxy.exchanges[asked:])
