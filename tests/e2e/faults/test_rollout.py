"""A rollout of the operator, as in an upgrade: the Lease passes from pod to pod without effect on jobs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.demo import chart

from tests.e2e.faults.support.undisturbed import Undisturbed
from tests.e2e.support.job import PATIENCE_SECONDS, Job
from tests.support import patience

pytestmark = pytest.mark.e2e

WHERE = f"--namespace={chart.NAMESPACE}"


@dataclass
class Seen:
    """Observations of a rollout, collected by repeated calls of `look`."""

    kubernetes: Kubernetes
    holders: list[str] = field(default_factory=list)
    """Holders of the Lease, in order."""
    renewals: list[datetime] = field(default_factory=list)
    available: set[int] = field(default_factory=set)
    """Observed numbers of available pods."""

    def look(self) -> bool:
        """Record the current state; return whether the rollout has ended."""
        lease, deployment = self._get("lease")["spec"], self._get("deployment")
        holder = str(lease["holderIdentity"])
        if holder and holder not in self.holders[-1:]:
            self.holders.append(holder)
        self.renewals.append(datetime.fromisoformat(lease["renewTime"]))
        self.available.add(int(deployment["status"].get("availableReplicas", 0)))
        return _is_done(deployment)

    @property
    def longest(self) -> timedelta:
        """Longest time between two renewals of the Lease."""
        times = sorted(set(self.renewals))
        return max(after - before for before, after in pairwise(times))

    def _get(self, kind: str) -> dict[str, Any]:
        found = self.kubernetes.find(kind, chart.RELEASE, WHERE)
        assert found, f"there is a {kind}"
        return found


def _is_done(deployment: dict[str, Any]) -> bool:
    status, wanted = deployment["status"], deployment["spec"]["replicas"]
    counts = {status.get(name) for name in ("replicas", "updatedReplicas", "availableReplicas")}
    return bool(status["observedGeneration"] == deployment["metadata"]["generation"] and counts == {wanted})


@pytest.fixture
def standby(kubernetes: Kubernetes) -> Iterator[None]:
    """Scale the operator to two replicas, the chart's default; the cluster of these tests has one."""
    scale = ("scale", f"deployment/{chart.RELEASE}", WHERE)
    kubernetes.run(*scale, "--replicas=2")
    seen = Seen(kubernetes)
    patience.wait_for("both operators", lambda: seen.look() and 2 in seen.available, lambda: vars(seen))
    yield
    kubernetes.run(*scale, "--replicas=1")


@pytest.mark.long
@pytest.mark.usefixtures("standby")
def test_a_rollout_leaves_no_gap(
    start: Callable[..., Job], undisturbed: Undisturbed, kubernetes: Kubernetes, capsys: pytest.CaptureFixture[str]
) -> None:
    job, seen = start("rolled"), Seen(kubernetes)
    job.wait_for_steps("pseudo", 20)
    assert seen.look(), "nothing is rolled out yet"
    kubernetes.run("rollout", "restart", f"deployment/{chart.RELEASE}", WHERE)
    patience.wait_for("the rollout", seen.look, lambda: vars(seen), PATIENCE_SECONDS, pause=0.2)
    patience.wait_for("a new holder", lambda: seen.look() and len(seen.holders) > 1, lambda: seen.holders)
    undisturbed.check(job)
    status = job.status()
    assert (status.restarts, status.execution) == (0, 1)
    with capsys.disabled():
        print(f"holders {seen.holders}, longest {seen.longest.total_seconds():.1f} s, available {seen.available}")
    assert seen.longest < timedelta(seconds=15), "the Lease never ran out"
    assert min(seen.available) >= 2, "the old pods end when new ones are ready"
