"""Idle jobs cost no requests."""

import time
from functools import partial

import pytest

from tests.integration.operator.chaos.support.lives import Lives
from tests.integration.operator.chaos.support.proxy import Proxy
from tests.support.cluster import Job
from tests.support.patience import wait_for

pytestmark = pytest.mark.integration

JOBS = 5
QUIET_SECONDS = 6.0
"""Seconds without requests; longer than any polling interval of a polling operator."""


class _Silence:
    """Time since the last request other than a watch."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy, self._requests, self._begin = proxy, -1, 0.0

    def has_lasted(self) -> bool:
        requests = sum(not exchange.is_watch for exchange in self._proxy.exchanges)
        if requests != self._requests:
            self._requests, self._begin = requests, time.monotonic()
        return time.monotonic() - self._begin > QUIET_SECONDS


def _has_told(job: Job, reason: str) -> bool:
    return reason in job.reasons()


def test_a_new_operator_leaves_jobs_alone_at_which_nothing_is_to_be_done(lives: Lives) -> None:
    """The new operator recognizes ended, suspended and training jobs from a few list requests."""
    with lives.life("quiet") as life:
        life.create()
        life.run_to_the_end()
        suspended = [life.cluster.create(f"suspended-{number}", spec__suspend=True) for number in range(JOBS)]
        for job in suspended:
            job.wait("the suspension", lambda status: status.state == "Suspended")
            wait_for("its events", partial(_has_told, job, "Suspended"))
        training = life.cluster.create("training")
        training.run("training-pseudo-e1")
        training.wait("the training", lambda status: any(c.reason == "Training" for c in status.conditions))
        wait_for("the last event", lambda: "Completed" in life.job.reasons())
        wait_for("no request for a while", _Silence(life.proxy).has_lasted)

        life.operator.kill()
        asked = len(life.proxy.exchanges)
        life.operator.start()
        wait_for("the lists", lambda: any(e.path.endswith("/pods") for e in life.proxy.exchanges[asked:]))
        wait_for("no request for a while", _Silence(life.proxy).has_lasted)
        names = {life.job.name, training.name, *(job.name for job in suspended)}
        assert [e.path for e in life.proxy.exchanges[asked:] if any(name in e.path for name in names)] == []
        life.cluster.patch_job(suspended[0].name, {"spec": {"suspend": False}})
        suspended[0].pods(f"{suspended[0].name}-pseudo-e1")
