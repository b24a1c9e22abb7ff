"""A working operator holds the Lease. chaos/test_standby.py tests its handover."""

from collections.abc import Callable
from typing import Any

import pytest
from kubernetes import client

from tests.support.chart import RELEASE
from tests.support.cluster import Cluster
from tests.support.operator_process import Operator
from tests.support.patience import PATIENCE_SECONDS, wait_for

pytestmark = pytest.mark.integration

MakeOperator = Callable[[str], Operator]


def holder(cluster: Cluster) -> Any:
    found = cluster.list("apis/coordination.k8s.io/v1 leases")
    return found[0]["spec"]["holderIdentity"] if found else None


def begin_to_wait(operator: Operator) -> Operator:
    """Start an operator without access to the Lease; it has to wait."""
    operator.start()
    wait_for("its patience", lambda: operator.lines("lease_awaited"))
    # kopf complains of its own end while it looks for kinds.
    wait_for("its readiness", operator.is_ready)
    return operator


def works(operator: Operator) -> bool:
    return bool(operator.lines("lease_acquired"))


def test_a_standby_operator_ends_at_sigterm(cluster: Cluster, make_operator: MakeOperator) -> None:
    _hold(cluster, "somebody")
    waiting = begin_to_wait(make_operator("waiting"))
    assert waiting.stop() == 0
    assert not works(waiting)
    assert holder(cluster) == "somebody"


def test_an_operator_exits_when_it_loses_the_lease(cluster: Cluster, make_operator: MakeOperator) -> None:
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
    """Take the Lease by force."""
    leases = client.CoordinationV1Api(cluster.api)
    spec = {"holderIdentity": name, "leaseDurationSeconds": 30}
    if cluster.list("apis/coordination.k8s.io/v1 leases"):
        leases.patch_namespaced_lease(RELEASE, cluster.namespace, {"spec": spec})
    else:
        lease: Any = {"metadata": {"name": RELEASE}, "spec": spec}
        leases.create_namespaced_lease(cluster.namespace, lease)
