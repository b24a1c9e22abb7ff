"""PodGroups on a real API server: the group of a job, taken names, and a cluster without PodGroups."""

from typing import Any

import pytest
from kubernetes import client
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_operator.manifests.scheduling import gang_of
from pseudoreal_operator.observe.stages import Stage, StageKind

from tests.support import pod_groups
from tests.support.cluster import Cluster
from tests.support.names import bare
from tests.support.operator_process import Operator
from tests.support.patience import wait_for

pytestmark = pytest.mark.integration

# This API server serves no PodGroups of Kubernetes' own, which are of 1.37.
POLICIES = {
    "SchedulerPlugins": "scheduling.x-k8s.io/v1alpha1",
    "Volcano": "scheduling.volcano.sh/v1beta1",
}


def groups(cluster: Cluster, version: str) -> list[dict[str, Any]]:
    return cluster.list(f"apis/{version} podgroups")


def template(cluster: Cluster, child: str) -> dict[str, Any]:
    (job,) = [job for job in cluster.list("apis/batch/v1 jobs") if bare(job["metadata"]["name"]) == child]
    found: dict[str, Any] = job["spec"]["template"]
    return found


@pytest.mark.usefixtures("pod_group_definitions")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_phase_has_a_pod_group_and_a_foreign_group_of_that_name_is_not_adopted(
    cluster: Cluster, stopped_operator: Operator, policy: str
) -> None:
    version, (group, _, number) = POLICIES[policy], POLICIES[policy].partition("/")
    job = cluster.create("gang", spec__scheduling={"gang": {"policy": policy}})
    gang = gang_of(PseudoRealJob.from_object(job.body), Stage(0, "pseudo", StageKind.TRAIN))
    assert gang is not None
    custom = client.CustomObjectsApi(cluster.api)
    stranger = {"apiVersion": version, "kind": "PodGroup", "metadata": {"name": gang.name}, "spec": {}}
    custom.create_namespaced_custom_object(group, number, cluster.namespace, "podgroups", stranger)
    stopped_operator.start()
    job.wait("the conflict", lambda status: any(c.reason == "NameConflict" for c in status.conditions))
    assert f"PodGroup {gang.name} in namespace" in job.condition("Progressing")["message"]
    assert job.child_jobs() == []
    custom.delete_namespaced_custom_object(group, number, cluster.namespace, "podgroups", gang.name)
    job.pods("gang-pseudo-e1")
    (found,) = groups(cluster, version)
    assert found["metadata"]["name"] == gang.name
    assert found["metadata"]["ownerReferences"][0]["name"] == "gang"
    assert found["spec"] == gang.spec
    pod = template(cluster, "gang-pseudo-e1")
    assert pod["metadata"]["labels"].items() >= gang.pod_labels.items()
    assert pod["metadata"].get("annotations", {}).items() >= gang.pod_annotations.items()


@pytest.mark.usefixtures("pod_group_definitions")
def test_a_job_waits_and_reports_missing_pod_groups(cluster: Cluster, stopped_operator: Operator) -> None:
    version = POLICIES["Volcano"]
    definitions, body = client.ApiextensionsV1Api(cluster.api), pod_groups.definition(version)
    definitions.delete_custom_resource_definition(body["metadata"]["name"])
    wait_for("the end of the definition", lambda: not pod_groups.is_served(cluster.api, version))
    job = cluster.create("gang", spec__scheduling={"gang": {"policy": "Volcano"}})
    stopped_operator.start()
    job.wait("the reason", lambda status: any(c.reason == "Blocked" for c in status.conditions))
    assert f"has no PodGroup of {version}" in job.condition("Progressing")["message"]
    assert job.child_jobs() == []
    pod_groups.define(cluster.api, version)
    job.pods("gang-pseudo-e1")
    assert len(groups(cluster, version)) == 1
