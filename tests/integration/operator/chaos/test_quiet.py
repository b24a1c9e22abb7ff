"""Jobs that nothing happens to cost no requests."""

import time

import pytest

from tests.integration.operator.chaos.lives import Lives
from tests.integration.operator.chaos.proxy import Proxy
from tests.patience import wait_for

pytestmark = pytest.mark.integration

JOBS = 5
QUIET_SECONDS = 6.0
"""Longer than an operator that polls leaves any of them alone."""


class _Silence:
    """How long there was no request but those of watches."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy, self._requests, self._begin = proxy, -1, 0.0

    def has_lasted(self) -> bool:
        requests = sum(not exchange.is_watch for exchange in self._proxy.exchanges)
        if requests != self._requests:
            self._requests, self._begin = requests, time.monotonic()
        return time.monotonic() - self._begin > QUIET_SECONDS


def test_suspended_and_ended_jobs_are_not_looked_at_not_even_by_a_new_operator_if_they_ended(lives: Lives) -> None:
    with lives.life("quiet") as life:
        life.create()
        life.run_to_the_end()
        suspended = [life.cluster.create(f"suspended-{number}", spec__suspend=True) for number in range(JOBS)]
        for job in suspended:
            job.wait("the suspension", lambda status: status.phase == "Suspended")
            wait_for("its events", lambda job=job: "Suspended" in job.reasons())
        wait_for("the last event", lambda: "Succeeded" in life.job.reasons())
        wait_for("no request for a while", _Silence(life.proxy).has_lasted)

        life.operator.kill()
        asked = len(life.proxy.exchanges)
        life.operator.start()
        for job in suspended:
            wait_for("a look", lambda job=job: any(e.path.endswith(job.name) for e in life.proxy.exchanges[asked:]))
        assert not any(e.path.endswith(f"/pseudorealjobs/{life.job.name}") for e in life.proxy.exchanges[asked:])
