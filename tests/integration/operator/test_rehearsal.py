"""Dry run: the Jobs of all stages are tried on the real API server before the first one is created, and no unknown
field is dropped silently."""

import pytest

from tests.support.cluster import Cluster

pytestmark = pytest.mark.integration


@pytest.mark.usefixtures("shared_operator")
def test_an_unknown_field_is_rejected_before_a_child_is_created(cluster: Cluster) -> None:
    """The CRD knows the field from a Kubernetes newer than this API server."""
    group = {"schedulingGroup": {"podGroupName": "all"}}
    job = cluster.create("newer", spec__phases__1__pod={"template": {"spec": group}})
    job.wait("the end", lambda status: status.state == "Failed")
    said = job.condition("Failed")
    assert said["reason"] == "InvalidSpec"
    assert 'unknown field "spec.template.spec.schedulingGroup"' in said["message"]
    assert "(phase real)" in said["message"]
    assert job.child_jobs() == []
