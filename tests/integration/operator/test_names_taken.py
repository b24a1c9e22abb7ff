"""A foreign object with the name of a child is left unchanged, and the job waits for the name."""

from typing import Any

import pytest
from kubernetes import client
from pseudoreal_api.names import execution_name, network_name

from tests.support.cluster import Cluster
from tests.support.operator_process import Operator

pytestmark = pytest.mark.integration


def test_a_foreign_job_with_the_name_of_a_child_is_reported_and_untouched(
    cluster: Cluster, stopped_operator: Operator
) -> None:
    job = cluster.create("robbed")
    name = execution_name("robbed", job.body["metadata"]["uid"], "pseudo", "train", 1)
    pod = {"restartPolicy": "Never", "containers": [{"name": "mine", "image": "mine"}]}
    mine: Any = {"metadata": {"name": name}, "spec": {"template": {"spec": pod}}}
    client.BatchV1Api(cluster.api).create_namespaced_job(cluster.namespace, mine)
    stopped_operator.start()
    job.wait("the conflict", lambda status: any(c.reason == "NameConflict" for c in status.conditions))
    assert f"Job {name} in namespace" in job.condition("Progressing")["message"]
    cluster.delete_child_job("robbed-pseudo-e1")
    job.pods("robbed-pseudo-e1")


def test_a_foreign_service_with_the_name_of_a_child_is_reported_and_untouched(
    cluster: Cluster, stopped_operator: Operator
) -> None:
    job = cluster.create("robbed")
    uid = job.body["metadata"]["uid"]
    mine: Any = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": network_name("robbed", uid)}}
    core = client.CoreV1Api(cluster.api)
    core.create_namespaced_service(cluster.namespace, mine | {"spec": {"ports": [{"port": 80}]}})
    stopped_operator.start()
    job.wait("the conflict", lambda status: any(c.reason == "NameConflict" for c in status.conditions))
    assert f"Service {mine['metadata']['name']} in namespace" in job.condition("Progressing")["message"]
    (found,) = cluster.list("api/v1 services")
    assert (found["spec"]["ports"][0]["port"], found["metadata"].get("ownerReferences")) == (80, None)
    assert job.child_jobs() == []
    core.delete_namespaced_service(mine["metadata"]["name"], cluster.namespace)
    job.pods("robbed-pseudo-e1")


def test_an_existing_secret_with_the_name_of_a_child_is_used_unread(
    cluster: Cluster, stopped_operator: Operator
) -> None:
    """The creator of the Secret learns only the secret of this job."""
    job = cluster.create("robbed", spec__phases__0__workers=2)
    name = network_name("robbed", job.body["metadata"]["uid"])
    mine: Any = {"metadata": {"name": name}, "stringData": {"secret": "known"}}
    client.CoreV1Api(cluster.api).create_namespaced_secret(cluster.namespace, mine)
    stopped_operator.start()
    job.pods("robbed-pseudo-e1", 2)
    (found,) = cluster.list("api/v1 secrets")
    assert found["metadata"].get("ownerReferences") is None
