"""Objects that anyone may create beside a job, against a real API server."""

from typing import Any

import pytest
from kubernetes import client
from pseudoreal_api.names import LABEL_JOB, LABEL_JOB_UID

from tests.support.cluster import Cluster, complete_stage
from tests.support.operator_process import Operator
from tests.support.patience import wait_for

pytestmark = pytest.mark.integration

_VARIABLES = 40_000
"""Number of variables beyond the operator's reading limit, within etcd's size limit."""


def test_oversized_pods_with_the_labels_of_a_job_are_ignored(cluster: Cluster, shared_operator: Operator) -> None:
    job = cluster.create("beset")
    labels = {LABEL_JOB: "beset", LABEL_JOB_UID: job.body["metadata"]["uid"]}
    env = [{"name": f"v{number:05}", "value": "x"} for number in range(_VARIABLES)]
    spec = {"containers": [{"name": "trainer", "image": "x", "env": env}]}
    for number in range(3):
        pod: Any = {"metadata": {"name": f"beset-{number}", "labels": labels}, "spec": spec}
        client.CoreV1Api(cluster.api).create_namespaced_pod(cluster.namespace, pod)

    def skipped() -> list[str]:
        return [line["name"] for line in shared_operator.lines("object_skipped") if line["kind"] == "Pod"]

    wait_for("the pods to be named", lambda: {f"beset-{number}" for number in range(3)} <= {*skipped()}, skipped)
    complete_stage(job, "pseudo")
    job.pods("beset-real-delink-e1")
    assert shared_operator.health()["dead_tasks"] == []
