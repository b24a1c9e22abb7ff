"""Jobs that the API server accepted without the policy: an administrator removed it, or installed it later."""

from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client
from pseudoreal_api.publish import policy

from tests.support.asking import Asking
from tests.support.cluster import Cluster, Job
from tests.support.depth import DEPTH
from tests.support.installed import POLICY
from tests.support.jobs import bad_jobs, good_job
from tests.support.kubectl import Kubectl
from tests.support.patience import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.minors]

Json = dict[str, Any]

BAD = good_job("probe", spec__model__layers=3)
REFUSED = "spec.phases[pseudo].sharing.blocks 2 must divide spec.model.layers 3"


@pytest.fixture
def unguarded(cluster: Cluster, kubectl: Kubectl) -> Iterator["Unguarded"]:
    """Namespace of an API server whose policy is not bound, until `guard` is called or the test ends."""
    found = Unguarded(cluster, kubectl)
    kubectl.said("delete", "validatingadmissionpolicybinding", policy.NAME)
    try:
        wait_for("an API server without the policy", lambda: not found.refusal(BAD))
        yield found
    finally:
        found.guard()


class Unguarded:
    def __init__(self, cluster: Cluster, kubectl: Kubectl) -> None:
        self.cluster, self._kubectl = cluster, kubectl

    def guard(self) -> None:
        self._kubectl.said("apply", "--server-side", "-f", str(POLICY))
        wait_for("the policy", lambda: REFUSED in self.refusal(BAD))

    def refusal(self, body: Json) -> str:
        path = f"apis/pseudoreal.dev/v1alpha1/namespaces/{self.cluster.namespace}/pseudorealjobs"
        return Asking(self.cluster.api).create(path, body)

    def create(self, name: str, body: Json) -> Job | None:
        """Create a job; return None if the definition refuses it."""
        given = body["metadata"]["name"]
        named = body | {"metadata": body["metadata"] | {"name": name if given == "good" else given}}
        api: Any = client.CustomObjectsApi(self.cluster.api)
        try:
            api.create_namespaced_custom_object(
                "pseudoreal.dev", "v1alpha1", self.cluster.namespace, "pseudorealjobs", named, field_validation="Strict"
            )
        except client.ApiException:
            return None
        return Job(self.cluster, named["metadata"]["name"])


@pytest.mark.usefixtures("shared_operator")
def test_operator_refuses_jobs_that_no_policy_saw_with_the_sentences_of_the_policy(unguarded: Unguarded) -> None:
    bad = bad_jobs()[:: DEPTH.of(8, 1)]
    stored = [(job, case) for i, case in enumerate(bad) if (job := unguarded.create(f"bad-{i}", case.body))]
    assert len(stored) > len(bad) / 2
    for job, case in stored:
        job.wait(case.name, lambda status: status.state == "Failed")
        accepted = job.condition("Accepted")
        assert (accepted["status"], accepted["reason"]) == ("False", "InvalidSpec")
        for piece in case.says:
            assert piece.lower() in accepted["message"].lower()
        assert job.children("apis/batch/v1 jobs") == []


def test_job_that_is_older_than_the_policy_keeps_its_mistake_and_lives_on(unguarded: Unguarded) -> None:
    job = unguarded.create("older", BAD | {"metadata": {"name": "older"}})
    assert job
    unguarded.guard()
    cluster = unguarded.cluster
    cluster.patch_status("older", {"state": "Training", "restarts": 1})
    cluster.patch_job("older", {"metadata": {"labels": {"team": "blue"}}})
    cluster.patch_job("older", {"spec": {"suspend": True, "deadlines": {"activeSeconds": 60}}})
    assert (job.body["spec"]["suspend"], job.body["status"]["restarts"]) == (True, 1)
    for spec in ({"hang": {"action": "Report"}}, {"scheduling": {"queue": "night"}}):
        with pytest.raises(client.ApiException) as refused:
            cluster.patch_job("older", {"spec": spec})
        assert REFUSED in (refused.value.body or "")


def test_status_is_not_shown_to_the_policy(cluster: Cluster, kubectl: Kubectl) -> None:
    job = cluster.create("counted", spec__suspend=True)

    def asked() -> float:
        """Return how often the API server has looked whether the policy concerns a request."""
        lines = kubectl.said("get", "--raw", "/metrics").splitlines()
        counts = "apiserver_admission_match_condition_evaluation_seconds_count"
        return sum(float(line.split()[-1]) for line in lines if line.startswith(counts) and policy.NAME in line)

    before = asked()
    for number in range(5):
        cluster.patch_status(job.name, {"restarts": number})
    assert asked() == before
    cluster.patch_job(job.name, {"metadata": {"labels": {"team": "blue"}}})
    assert asked() == before + 1
