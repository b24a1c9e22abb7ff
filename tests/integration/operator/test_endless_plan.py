"""An endless plan function is aborted; the Lease, reports and other jobs are not affected."""

import os
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from tests.integration.operator.support.endpoint import Reporter, at
from tests.support.cluster import Cluster, Job
from tests.support.operator_process import Operator, run
from tests.support.patience import wait_for

pytestmark = pytest.mark.integration


def run_with_endless_plans(environment: dict[str, str]) -> None:
    """Run an operator with an endless plan function for the first generation of the job `endless`."""
    os.environ.update(environment)
    from pseudoreal_operator.lifecycle.plan import plan
    from pseudoreal_operator.loop import initial_list, reconcile

    def endless(seen: Any, *rest: Any) -> Any:
        while (seen.job.metadata.name, seen.job.metadata.generation) == ("endless", 1):
            pass
        return plan(seen, *rest)

    for module in (reconcile, initial_list):
        vars(module)["plan"] = endless
    run(environment)


def renewed(cluster: Cluster) -> datetime:
    (lease,) = cluster.list("apis/coordination.k8s.io/v1 leases")
    return datetime.fromisoformat(lease["spec"]["renewTime"])


def reason(job: Job) -> str | None:
    conditions = job.body.get("status", {}).get("conditions", [])
    return next((found["reason"] for found in conditions if found["type"] == "Progressing"), None)


def test_a_plan_without_an_end_stops_nothing_else(cluster: Cluster, make_operator: Callable[[str], Operator]) -> None:
    operator = make_operator("leader")
    operator.program, operator.expected = run_with_endless_plans, "plan_overran"
    before = cluster.create("before")
    operator.start()
    (pod,) = before.run("before-pseudo-e1")
    endless = cluster.create("endless")
    wait_for("the end of the plan", lambda: operator.lines("plan_overran"))
    # Whatever comes now comes while the plan is tried once more, or the job is left alone.
    last, begin = renewed(cluster), time.monotonic()
    other = cluster.create("other")
    other.pods("other-pseudo-e1")
    assert Reporter.of(cluster, pod).tell(at(3)).status == 200
    before.wait("the report", lambda status: status.progress is not None and status.progress.step == 3)
    wait_for("a renewal of the Lease", lambda: renewed(cluster) > last)
    assert time.monotonic() - begin < 15, "the Lease is another's after as long"
    wait_for("a condition", lambda: reason(endless) == "Unplannable")
    (said,) = [found for found in endless.body["status"]["conditions"] if found["type"] == "Progressing"]
    assert "took more than 0.5 s of processor time" in said["message"]
    assert operator.metrics()["pseudoreal_plan_overruns_total", frozenset()] >= 1
    cluster.patch_job("endless", {"spec": {"deadlines": {"activeSeconds": 3600}}})
    endless.pods("endless-pseudo-e1")
