"""One of two operators works: the one that holds the Lease."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from kubernetes import client

from tests.support.chart import RELEASE
from tests.support.cluster import Cluster
from tests.support.names import bare
from tests.support.operator_process import Operator
from tests.support.patience import PATIENCE_SECONDS, wait_for

pytestmark = pytest.mark.integration

MakeOperator = Callable[[str], Operator]


def holder(cluster: Cluster) -> Any:
    found = cluster.list("apis/coordination.k8s.io/v1 leases")
    return found[0]["spec"]["holderIdentity"] if found else None


def begin_to_wait(operator: Operator) -> Operator:
    """One that has to wait."""
    operator.start()
    wait_for("its patience", lambda: operator.lines("lease_awaited"))
    return operator


def works(operator: Operator) -> bool:
    return bool(operator.lines("lease_acquired"))


def test_one_works_and_the_other_takes_over(cluster: Cluster, make_operator: MakeOperator) -> None:
    first, second, third = (make_operator(name) for name in ("first", "second", "third"))
    first.start()
    wait_for("the first", lambda: holder(cluster) == "first")
    begin_to_wait(second)
    cluster.create("early").pods("early-pseudo-e1")
    assert not works(second)

    assert first.stop() == 0
    assert holder(cluster) != "first", "it gives the lease back"
    wait_for("the second", lambda: holder(cluster) == "second")
    cluster.create("late").pods("late-pseudo-e1")
    assert [bare(line["name"]) for line in second.lines("made") if line["kind"] == "Job"] == ["late-pseudo-e1"]

    begin_to_wait(third)
    begun = time.monotonic()
    second.kill()
    wait_for("the third", lambda: holder(cluster) == "third")
    assert time.monotonic() - begun > 25, "it may still live"
    cluster.create("last").pods("last-pseudo-e1")
    assert third.lines("made")


def test_an_operator_that_waits_ends_when_it_is_asked_to(cluster: Cluster, make_operator: MakeOperator) -> None:
    _hold(cluster, "somebody")
    waiting = begin_to_wait(make_operator("waiting"))
    assert waiting.stop() == 0
    assert not works(waiting)
    assert holder(cluster) == "somebody"


def test_an_operator_that_loses_the_lease_ends(cluster: Cluster, make_operator: MakeOperator) -> None:
    operator = make_operator("victim")
    operator.start()
    cluster.create("dropped").pods("dropped-pseudo-e1")
    operator.expected = "lease_lost"
    _hold(cluster, "thief")
    assert operator.process
    assert operator.process.wait(PATIENCE_SECONDS) == 1
    (said,) = operator.lines("lease_lost")
    assert said["error"] == "another operator took the lease", "it does not wait until its own has run out"
    assert holder(cluster) == "thief"


def _hold(cluster: Cluster, name: str) -> None:
    """Takes the lease, without asking for it."""
    leases = client.CoordinationV1Api(cluster.api)
    spec = {"holderIdentity": name, "leaseDurationSeconds": 30}
    if cluster.list("apis/coordination.k8s.io/v1 leases"):
        leases.patch_namespaced_lease(RELEASE, cluster.namespace, {"spec": spec})
    else:
        lease: Any = {"metadata": {"name": RELEASE}, "spec": spec}
        leases.create_namespaced_lease(cluster.namespace, lease)
