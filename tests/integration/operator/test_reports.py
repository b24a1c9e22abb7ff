"""Pod reports over HTTPS with real tokens: their assignment to jobs, and their effect on the status."""

import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config
from pseudoreal_api.wire.reports import ReportAnswer, SavedCheckpoint
from pseudoreal_trainer.runtime.reports import Endpoint, ReportRejected

from tests.integration.operator.support.endpoint import Reporter, at
from tests.support.cluster import Cluster, Job
from tests.support.names import OPERATOR
from tests.support.operator_process import Operator
from tests.support.patience import wait_for

pytestmark = pytest.mark.integration


def begin(cluster: Cluster, name: str, **changes: Any) -> tuple[Job, Reporter]:
    """Create a job and run its first pod; return the job and the pod's reporter."""
    job = cluster.create(name, **changes)
    (pod,) = job.run(f"{name}-pseudo-e1")
    return job, Reporter.of(cluster, pod)


@pytest.mark.usefixtures("shared_operator")
def test_progress_comes_from_reports(cluster: Cluster) -> None:
    job, pod = begin(cluster, "live")
    pod.tell(at(5, SavedCheckpoint(name="pseudo-4", step=4, seconds=90)))
    status = job.wait("the progress", lambda status: status.progress is not None)
    assert status.progress
    seen = status.progress.model_dump(exclude={"last_updated_time"})
    assert seen == {
        "step": 5,
        "total_steps": 20,
        "percent": 25,
        "phase_remaining_seconds": 30,
        "tokens": 1280,
        "loss": "4.5000",
        "validation_loss": "4.7500",
        "tokens_per_second": "128",
        "experts": None,
    }
    assert status.checkpoint
    assert (status.checkpoint.latest, status.checkpoint.step) == ("pseudo-4", 4)
    assert status.checkpoint.saved_time
    age = datetime.now(UTC) - datetime.fromisoformat(status.checkpoint.saved_time)
    assert timedelta(seconds=88) < age < timedelta(seconds=120)
    assert job.condition("Progressing")["reason"] == "Training"


@pytest.mark.usefixtures("shared_operator")
def test_the_operator_reads_the_log_of_a_silent_pod(cluster: Cluster, audit_log: Path) -> None:
    """The request fails here, because there is no kubelet."""
    begin = audit_log.stat().st_size
    job = cluster.create("silent")
    (pod,) = job.run("silent-pseudo-e1")
    asked = f"/api/v1/namespaces/{cluster.namespace}/pods/{pod['metadata']['name']}/log"
    wait_for("the request", lambda: asked.encode() in _since(begin, audit_log))
    assert job.condition("Progressing")["status"] == "True", "nothing depends on it"


@pytest.mark.usefixtures("shared_operator")
def test_reports_of_the_trainers_own_client_arrive(cluster: Cluster, tmp_path: Path) -> None:
    job, pod = begin(cluster, "spoken")
    (tmp_path / "token").write_text(pod.token)
    (tmp_path / "ca.crt").write_text(pod.authority)
    own = Endpoint(pod.url, tmp_path / "token", tmp_path / "ca.crt")

    def answer() -> ReportAnswer | None:
        with suppress(ReportRejected):
            return own.send(at(3))
        return None

    assert wait_for("an answer", answer) == ReportAnswer(finish_phase=False)
    job.wait("the progress", lambda status: bool(status.progress and status.progress.step == 3))


@pytest.mark.usefixtures("shared_operator")
def test_a_token_is_valid_for_its_own_job_only(cluster: Cluster) -> None:
    mine, pod = begin(cluster, "mine")
    yours, other = begin(cluster, "yours")
    pod.tell(at(7))
    other.tell(at(2))
    mine.wait("its own progress", lambda status: bool(status.progress and status.progress.step == 7))
    yours.wait("its own progress", lambda status: bool(status.progress and status.progress.step == 2))


@pytest.mark.usefixtures("shared_operator")
def test_invalid_tokens_are_rejected(cluster: Cluster) -> None:
    job, reporter = begin(cluster, "guarded")
    reporter.tell(at(3))
    (pod,) = job.pods("guarded-pseudo-e1")
    stranger = _foreign_pod(cluster)
    refused = {
        "for the API server": cluster.token(pod, audience="https://kubernetes.default.svc.cluster.local"),
        "for somebody else": cluster.token(pod, audience="vault"),
        "without a pod": cluster.token(None),
        "of a pod that is not ours": cluster.token(stranger),
        "changed": cluster.token(pod)[:-8] + "AAAAAAAA",
    }
    statuses = {what: reporter.with_token(token).send(at(9)).status for what, token in refused.items()}
    assert statuses == {
        "for the API server": 401,
        "for somebody else": 401,
        "without a pod": 403,
        "of a pod that is not ours": 403,
        "changed": 401,
    }
    assert reporter.with_token(cluster.token(pod)).send(at(4)).status == 200, "another token of the same pod"


@pytest.mark.usefixtures("shared_operator")
def test_the_token_of_a_deleted_pod_is_rejected(cluster: Cluster) -> None:
    job = cluster.create("bygone")
    (pod,) = job.pods("bygone-pseudo-e1")
    reporter = Reporter.of(cluster, pod)
    name = pod["metadata"]["name"]
    cluster.delete_pod(name)
    wait_for("the deletion", lambda: name not in [p["metadata"]["name"] for p in cluster.list("api/v1 pods")])
    # The API server may know a moment longer than its list of pods that the token was good.
    assert reporter.send(at(3)).status in (401, 403)


@pytest.mark.usefixtures("operator")
def test_a_pod_of_another_namespace_is_rejected_regardless_of_its_labels(cluster: Cluster) -> None:
    job, reporter = begin(cluster, "envied")
    reporter.tell(at(3))
    (pod,) = job.pods("envied-pseudo-e1")
    elsewhere = Cluster(cluster.api, "default")
    forged = _foreign_pod(elsewhere, pod["metadata"]["labels"])
    try:
        answer = reporter.with_token(elsewhere.token(forged)).send(at(9))
        assert (answer.status, answer.text) == (403, "this operator does not watch namespace default")
    finally:
        elsewhere.delete_pod(forged["metadata"]["name"])


@pytest.mark.usefixtures("shared_operator")
def test_progress_is_written_every_ten_seconds_at_most(cluster: Cluster) -> None:
    job, pod = begin(cluster, "hasty", spec__phases__0__until__step=1000, spec__phases__1__until__step=2000)
    pod.tell(at(1))
    first = job.wait("the progress", lambda status: status.progress is not None).progress
    begun, version, step = time.monotonic(), job.body["metadata"]["resourceVersion"], 1
    # Two looks of the operator fall into this time.
    while time.monotonic() < begun + 8:
        step += 1
        assert pod.send(at(step)).status == 200
        assert job.body["metadata"]["resourceVersion"] == version
        time.sleep(1)
    second = job.wait("newer progress", lambda status: status.progress != first).progress
    assert first
    assert second
    times = [datetime.fromisoformat(progress.last_updated_time) for progress in (first, second)]
    assert times[1] - times[0] >= timedelta(seconds=10)
    assert second.step == step


@pytest.mark.usefixtures("shared_operator")
def test_a_phase_is_told_to_finish_through_the_answers_to_reports(cluster: Cluster) -> None:
    job, pod = begin(cluster, "ended-early")
    assert not pod.tell(at(1)).finish_phase
    request = {"id": "1", "type": "FinishPhase", "phase": "pseudo"}
    cluster.patch_job(job.name, {"spec": {"requests": [request]}})
    wait_for("the wish in the answer", lambda: _asks_to_finish(pod))
    job.wait("the condition", lambda status: any(c.reason == "Finishing" for c in status.conditions))
    progressing = job.condition("Progressing")
    assert progressing["status"] == "True"
    assert "asked to end now, with a checkpoint" in progressing["message"]
    job.tells("Accepted", "PhaseStarted", "FinishRequested")
    cluster.patch_job(job.name, {"spec": {"requests": [request | {"id": "2", "phase": "real"}]}})
    wait_for("an answer without it", lambda: not _asks_to_finish(pod))


def test_a_restarted_operator_receives_reports_again(cluster: Cluster, operator: Operator) -> None:
    job, pod = begin(cluster, "patient")
    assert pod.tell(at(2)).status == 200
    operator.kill()
    operator.start()
    wait_for("the endpoint", lambda: operator.lines("report_endpoint_started")[1:])
    pod.tell(at(6))
    job.wait("the progress", lambda status: bool(status.progress and status.progress.step == 6))


def test_the_operator_may_not_read_secrets(cluster: Cluster, operator_kubeconfig: Any) -> None:
    api = config.new_client_from_config(str(operator_kubeconfig))
    allowed = {
        "secrets": _may(api, cluster.namespace, "secrets", "get"),
        "jobs": _may(api, cluster.namespace, "jobs", "list", "batch"),
        "reviews": _may(api, None, "tokenreviews", "create", "authentication.k8s.io"),
    }
    assert allowed == {"secrets": False, "jobs": True, "reviews": True}
    with pytest.raises(client.ApiException) as refused:
        client.CoreV1Api(api).list_namespaced_secret(cluster.namespace)
    assert refused.value.status == 403
    assert OPERATOR in str(refused.value.body)


def _since(begin: int, log: Path) -> bytes:
    with log.open("rb") as file:
        file.seek(begin)
        return file.read()


def _asks_to_finish(pod: Reporter) -> bool:
    answer = pod.send(at(2))
    # The tests ask more often than a pod may.
    return answer.status == 200 and answer.finish_phase


def _foreign_pod(cluster: Cluster, labels: dict[str, str] | None = None) -> dict[str, Any]:
    body: Any = {
        "metadata": {"name": "stranger", "labels": labels or {}},
        "spec": {"containers": [{"name": "c", "image": "registry.example/any"}]},
    }
    client.CoreV1Api(cluster.api).create_namespaced_pod(cluster.namespace, body)
    return next(pod for pod in cluster.list("api/v1 pods") if pod["metadata"]["name"] == "stranger")


def _may(api: client.ApiClient, namespace: str | None, resource: str, verb: str, group: str = "") -> bool:
    wish = {"namespace": namespace, "resource": resource, "verb": verb, "group": group}
    asked: Any = {"spec": {"resourceAttributes": wish}}
    review = client.AuthorizationV1Api(api).create_self_subject_access_review(asked)
    return bool(review.status and review.status.allowed)
