"""A queue holds a Job and admits it, as the Job controller reports it: no time limit runs in the meantime."""

from datetime import UTC, datetime, timedelta

import pytest
from pseudoreal_operator import clock

from tests.support.cluster import Cluster
from tests.support.patience import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("shared_operator")]


def test_time_in_a_queue_does_not_count_against_the_deadline(cluster: Cluster) -> None:
    job, child = cluster.create("held", spec__deadlines={"activeSeconds": 3600}), "held-pseudo-e1"
    job.run(child)
    before = job.wait("training", lambda status: bool(status.phases) and status.phases[0].state == "Training")
    cluster.hold_child_job(child, True)
    since = clock.from_text(job.wait("the hold", lambda status: bool(status.queued_since)).queued_since or "")
    assert job.condition("Progressing")["reason"] == "Queued"
    wait_for("more than a second of it", lambda: datetime.now(UTC) > since + timedelta(seconds=2))
    cluster.hold_child_job(child, False)
    after = job.wait("the admission", lambda status: status.queued_since is None)
    held = clock.from_text(after.execution_time or "") - since
    assert held >= timedelta(seconds=1)
    assert clock.from_text(after.active_since or "") - clock.from_text(before.active_since or "") == held
    job.complete(child, checkpoint="pseudo-10", digest="0" * 64, step=10)
    job.wait("the delink", lambda status: status.state == "Delinking")
    assert (job.status.execution, job.status.restarts) == (1, 0)
