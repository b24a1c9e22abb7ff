"""Passes over a job that has changed since it was read, with an API server that rejects writes, and with bugs of the
operator."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest
from kubernetes.aio.client import ApiException
from pseudoreal_operator.cluster.api import Api, Json, Name
from pseudoreal_operator.loop import reconcile as module
from pseudoreal_operator.loop.event_recorder import EventRecorder
from pseudoreal_operator.loop.planning_thread import Overran, PlanningThread
from pseudoreal_operator.loop.reconcile import Callbacks, Dependencies, JobDeleted, is_invalid_object, reconcile
from pseudoreal_operator.metrics.registry import REGISTRY, OperatorCounters
from pseudoreal_operator.observe.report_store import ReportStore
from pseudoreal_operator.settings import Settings

from tests.support.jobs import good_job

SETTINGS = Settings("trainer:1", "IfNotPresent", ())


ENDED = {
    "type": "Complete",
    "status": "True",
    "reason": "AllPhasesDone",
    "message": "",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
    "observedGeneration": 1,
}


TRAINS = """{
  "execution": 1, "executionTime": "2026-01-01T00:00:00Z", "phases": [{"name": "pseudo", "state": "Training"},
  {"name": "real", "state": "Pending"}], "placement": {"phaseName": "pseudo", "execution": 1, "nodes": []}
}"""


def make_child_job(job: Json) -> Json:
    """Return the running Job of the job's first execution."""
    about = {"job-name": "good", "job-uid": "one", "phase": "real", "stage": "train", "execution": "1"}
    owner = {"kind": "PseudoRealJob", "uid": job["metadata"]["uid"], "controller": True}
    labels = {f"pseudoreal.dev/{key}": value for key, value in about.items()}
    return {"metadata": {"name": "good-real-e1", "labels": labels, "ownerReferences": [owner]}, "status": {"active": 1}}


MANAGER = "pseudoreal-operator"
"""Field manager of whole statuses."""


class Server:
    """A fake API server with one job; records what is applied.

    `rejection`: status code for every status write; `banned`: a status with this text is rejected as invalid;
    `missing`: how many reads of the job answer 404; `gone`: the job does not exist; `lost`: error in place of the
    answer to the first status write, which is stored if `taken`.
    """

    def __init__(
        self,
        rejection: int | None = None,
        child_rejection: ApiException | None = None,
        banned: str | None = None,
        missing: int = 0,
        gone: bool = False,
        lost: Exception | None = None,
        taken: bool = True,
    ) -> None:
        self._rejection, self._child_rejection, self._banned = rejection, child_rejection, banned
        self._rejected_kind = ""
        self._missing, self._gone = missing, gone
        self._lost, self._taken = lost, taken
        self.body = good_job()
        self.body["metadata"] |= {"namespace": "default", "uid": "one", "resourceVersion": "7", "generation": 1}
        self.also_banned = ""
        self.banned_by = ApiException(status=400, reason="error decoding YAML")
        self.requests = 0
        self.order: list[str] = []
        self.jobs: list[Json] = []
        self.deleted: list[str] = []
        self.executions: list[Json] = []
        self.applied: list[Json] = []
        self.created: list[Json] = []
        self.managers: list[str] = []

    async def find_within(self, _most: int, *asked: str) -> Json | None:
        return await self.find(*asked)

    async def find(self, *_: str) -> Json | None:
        self.requests += 1
        if self._missing:
            self._missing -= 1
            return None
        return None if self._gone else self.body

    async def is_listed(self, _kind: str, _namespace: str, _name: str) -> bool:
        return not self._gone

    async def each(
        self, kind: str, _namespace: str, _selector: str = "", *, listed: Callable[[str], object], **_: Any
    ) -> AsyncIterator[Json]:
        listed("7")
        self.requests += 1
        for job in self.jobs if kind == "Job" else ():
            yield job

    async def delete(self, _kind: str, _namespace: str, name: str) -> None:
        self.deleted.append(name)

    def reject(self, kind: str, rejection: ApiException) -> None:
        """Reject children of this kind from now on."""
        self._rejected_kind, self._child_rejection = kind, rejection

    def store_status(self) -> None:
        """Store the last applied status in the job. As in server-side apply, the conditions of the manager of errors
        join those of the whole status, which has a manager of its own."""
        status = self.applied[-1]["status"]
        if self.managers[-1] != MANAGER:
            before = self.body.get("status") or {}
            replaced = {condition["type"] for condition in status["conditions"]}
            others = [each for each in before.get("conditions", ()) if each["type"] not in replaced]
            status = before | status | {"conditions": [*others, *status["conditions"]]}
        self.body["status"] = status

    async def create(self, manifest: Json, *, dry_run: bool = False) -> Json:
        if dry_run:
            return manifest
        if self._child_rejection and self._rejected_kind in ("", manifest["kind"]):
            raise self._child_rejection
        self.created.append(manifest)
        self.order.append(manifest["kind"])
        return manifest

    async def apply(self, manifest: Json, _: str, *, manager: str = MANAGER) -> Json:
        self.executions.append(manifest)
        if self._rejection:
            raise ApiException(status=self._rejection, reason="refused")
        if self._banned and self._banned in json.dumps(manifest):
            raise self.banned_by
        if self.also_banned and self.also_banned in json.dumps(manifest):
            raise self.banned_by
        lost, self._lost = self._lost, None
        if lost and not self._taken:
            raise lost
        self.applied.append(manifest)
        self.order.append("status")
        self.managers.append(manager)
        if lost:
            raise lost
        version = f"{manifest['metadata']['resourceVersion']}+"
        return (
            self.body
            | {"metadata": self.body["metadata"] | {"resourceVersion": version}}
            | {"status": manifest["status"]}
        )

    def condition(self, kind: str) -> Json:
        """Return the condition of this type as it was last written."""
        return next(c for c in self.applied[-1]["status"]["conditions"] if c["type"] == kind)


class FakeRecorder(EventRecorder):
    """Records events instead of posting them."""

    def __init__(self) -> None:
        super().__init__(cast(Api, None), OperatorCounters())
        self.posted: list[Json] = []

    def post(self, _job: Name, events: Any) -> None:
        self.posted += events


async def run_pass(
    server: Any,
    counters: OperatorCounters | None = None,
    recorder: FakeRecorder | None = None,
    wrote: list[Json] | None = None,
    report_store: ReportStore | None = None,
) -> float | None:
    deps = Dependencies(
        cast(Api, server),
        SETTINGS,
        report_store or ReportStore(),
        counters or OperatorCounters(),
        recorder or FakeRecorder(),
    )
    heard = [] if wrote is None else wrote
    return await reconcile(deps, Name("default", "good"), Callbacks(lambda _after: None, heard.append))


async def test_missing_job_counts_as_deleted() -> None:
    with pytest.raises(JobDeleted):
        await run_pass(Server(gone=True))


async def test_single_404_does_not_count_as_deletion_of_the_job() -> None:
    with pytest.raises(ApiException) as caught:
        await run_pass(server := Server(missing=1))
    assert caught.value.status == 404
    await run_pass(server)
    assert server.applied


async def test_job_in_deletion_gets_no_further_pass() -> None:
    server = Server()
    server.body["metadata"]["deletionTimestamp"] = "now"
    with pytest.raises(JobDeleted):
        await run_pass(server)


async def test_status_write_carries_the_version_that_was_read() -> None:
    server = Server()
    wrote: list[Json] = []
    await run_pass(server, wrote=wrote)
    assert server.applied[0]["metadata"] == {"name": "good", "namespace": "default", "resourceVersion": "7"}
    assert [written["metadata"]["resourceVersion"] for written in server.applied] == ["7", "7+"]
    assert [body["metadata"]["resourceVersion"] for body in wrote] == ["7+", "7++"]


async def test_job_is_accepted_and_started_in_one_pass_with_its_status_stored_before_children() -> None:
    server = Server()
    assert await run_pass(server) is None
    assert server.requests == 4, "the job, its Jobs, its pods and its claim are read once"
    assert [applied["status"]["execution"] for applied in server.applied] == [1, 1]
    assert server.order == ["status", "Service", "NetworkPolicy", "Job", "status"]


async def test_failed_status_write_of_an_acceptance_creates_no_children() -> None:
    server = Server(lost=ApiException(status=409), taken=False)
    with pytest.raises(ApiException):
        await run_pass(server)
    assert server.created == []


async def test_ended_job_is_forgotten_in_the_same_pass() -> None:
    server, report_store = Server(), ReportStore()
    server.body["spec"]["pod"] = {"template": {"spec": {"hostname": "mine"}}}
    assert await run_pass(server, report_store=report_store) is None
    assert server.condition("Failed")["status"] == "True"
    assert server.requests == 4
    assert report_store._jobs == {}


async def test_ended_jobs_children_are_deleted_and_the_pass_waits_for_changes() -> None:
    server = Server()
    server.body["spec"]["cleanUp"] = {"children": "Delete"}
    server.body["status"] = {"conditions": [ENDED]}
    server.jobs = [make_child_job(server.body)]
    assert await run_pass(server) is None
    assert server.deleted == ["good-real-e1"]


async def test_job_that_ends_with_work_left_gets_another_pass_at_once() -> None:
    server = Server()
    server.body["spec"] |= {"deadlines": {"ttlSecondsAfterFinished": 0}}
    server.body["spec"]["pod"] = {"template": {"spec": {"hostname": "mine"}}}
    assert await run_pass(server) == 0.0


@pytest.mark.parametrize("status", [404, 409, 429, 500])
async def test_rejected_status_write_is_raised_for_another_pass(status: int) -> None:
    with pytest.raises(ApiException) as caught:
        await run_pass(Server(rejection=status), recorder=(recorder := FakeRecorder()))
    assert caught.value.status == status
    assert recorder.posted == [], "no event is posted for a status that was not written"


async def test_status_with_a_rejected_text_is_written_without_texts() -> None:
    server, counters = Server(banned="is about to start"), OperatorCounters()
    await run_pass(server, counters)
    written, _ = server.applied
    assert (written["status"]["execution"], len(server.executions), counters.refused_statuses) == (1, 3, 1)
    messages = [condition["message"] for condition in written["status"]["conditions"]]
    assert len(messages) == 4
    assert all("refused the text of this condition; the operator's log shows it as text" in m for m in messages)


async def test_rejected_text_is_not_written_again_but_other_texts_are() -> None:
    server, counters = Server(banned="The job can run"), OperatorCounters()
    await run_pass(server, counters)
    assert counters.refused_statuses == 1
    messages = {c["type"]: c["message"] for c in server.applied[-1]["status"]["conditions"]}
    assert "refused" in messages["Accepted"]
    assert messages["Progressing"] == "Execution 1 at phase pseudo starts."


async def test_status_that_is_rejected_in_every_form_raises_and_is_reported() -> None:
    server, counters = Server(banned='"execution"'), OperatorCounters()
    with pytest.raises(ApiException):
        await run_pass(server, counters)
    (written,) = server.applied
    assert written["status"].keys() == {"conditions"}
    said = server.condition("Progressing")
    assert (said["status"], said["reason"]) == ("False", "StatusRefused")
    assert "error decoding YAML" in said["message"]
    assert (server.managers, counters.internal_errors) == (["pseudoreal-operator-errors"], 0)
    server.store_status()
    with pytest.raises(ApiException):
        await run_pass(server, counters)
    assert len(server.applied) == 1, "it is not written again"


async def test_rejection_that_cannot_be_quoted_is_reported_without_the_quote() -> None:
    server = Server(banned='"execution"')
    server.also_banned = "error decoding"
    with pytest.raises(ApiException):
        await run_pass(server)
    assert server.condition("Progressing")["message"].endswith("the operator's log has its answer.")


async def test_status_with_rejected_figures_is_written_without_figures() -> None:
    """The job's Job is gone, and the next execution is announced nevertheless."""
    server, counters = Server(banned="placement"), OperatorCounters()
    server.body["status"] = json.loads(TRAINS)
    await run_pass(server, counters)
    status = server.applied[-1]["status"]
    assert "placement" not in status
    assert (status["state"], status["execution"], counters.refused_statuses) == ("Restarting", 2, 2)


@pytest.mark.parametrize("rejection", [413, 500])
async def test_too_large_status_is_written_without_texts(rejection: int) -> None:
    server = Server(banned="is about to start")
    server.banned_by = ApiException(status=rejection, reason="etcdserver: request is too large")
    await run_pass(server)
    assert server.applied[0]["status"]["execution"] == 1


async def test_events_are_posted_after_their_status_is_written() -> None:
    await run_pass(server := Server(), recorder=(recorder := FakeRecorder()))
    assert [event["reason"] for event in recorder.posted] == ["Accepted", "PhaseStarted"]
    assert server.applied[0]["status"]["execution"] == 1


async def test_events_are_posted_once_although_a_plan_takes_too_long_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def overrun(*_: object) -> None:
        raise Overran("it took more than 0.5 s of processor time, and was ended")

    recorder, server = FakeRecorder(), Server()
    await run_pass(server, recorder=recorder)
    server.store_status()
    with monkeypatch.context() as patch:
        patch.setattr("pseudoreal_operator.loop.reconcile.plan", overrun)
        await run_pass(server, recorder=recorder)
    server.store_status()
    await run_pass(server, recorder=recorder)
    assert [event["reason"] for event in recorder.posted].count("Accepted") == 1


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("error", [ApiException(status=409), TimeoutError(), ApiException(status=504)])
async def test_events_of_an_unanswered_status_write_are_posted_once(error: Exception, taken: bool) -> None:
    recorder = FakeRecorder()
    server = Server(lost=error, taken=taken)
    with pytest.raises(type(error)):
        await run_pass(server, recorder=recorder)
    assert recorder.posted == []
    if taken:
        server.store_status()
    await run_pass(server, recorder=recorder)
    server.store_status()
    await run_pass(server, recorder=recorder)
    assert [event["reason"] for event in recorder.posted].count("Accepted") == 1


async def test_events_held_for_a_job_are_forgotten_with_the_job() -> None:
    recorder = FakeRecorder()
    with pytest.raises(TimeoutError):
        await run_pass(Server(lost=TimeoutError(), taken=True), recorder=recorder)
    assert len(recorder._held) == 1
    recorder.forget(*recorder._held)
    assert recorder._held == {}


INVALID = {"reason": "Invalid", "details": {"causes": [{"reason": "FieldValueRequired", "field": "spec.template"}]}}
POLICY = {"reason": "Invalid", "details": {"causes": [{"message": "no GPUs"}]}}


@pytest.mark.parametrize(
    ("status", "said", "invalid"),
    [
        (422, INVALID | {"message": "spec.template.spec.containers[0].image: Required value"}, True),
        (400, {"reason": "BadRequest", "message": "unknown field"}, True),
        (422, POLICY | {"message": "ValidatingAdmissionPolicy 'no-gpus' denied request: no GPUs"}, False),
        (422, POLICY | {"message": "in another language"}, False),
        (400, {"message": 'admission webhook "policy.example" denied the request: no'}, False),
        (422, INVALID | {"message": 'admission webhook "policy.example" denied the request: no'}, False),
        (403, {"reason": "Forbidden", "message": "exceeded quota"}, False),
        (409, {"reason": "Conflict"}, False),
        (500, {}, False),
    ],
)
def test_invalid_objects_are_distinguished_from_policy_rejections(status: int, said: Json, invalid: bool) -> None:
    assert is_invalid_object(ApiException(status=status, body=json.dumps(said))) is invalid


@pytest.mark.parametrize(
    ("status", "said", "state"),
    [
        (422, INVALID | {"message": "spec.template.spec.containers[0].image: Required value"}, "Failed"),
        (400, {"message": 'admission webhook "policy.example" denied the request: no'}, "Pending"),
        (422, POLICY | {"message": "ValidatingAdmissionPolicy 'no-gpus' denied request"}, "Pending"),
        (403, {"message": "exceeded quota"}, "Pending"),
    ],
)
async def test_only_an_invalid_child_fails_a_job_and_other_rejections_are_retried_with_backoff(
    status: int, said: Json, state: str
) -> None:
    rejection = ApiException(status=status, body=json.dumps(said))
    server = Server(child_rejection=rejection)
    rejection.headers = {"Retry-After": "77"}
    wait = await run_pass(server)
    assert wait == (0.0 if state == "Failed" else 77.0)
    assert server.applied[-1]["status"]["state"] == state
    conditions = server.applied[-1]["status"]["conditions"]
    assert any(said["message"] in condition["message"] for condition in conditions)


async def test_internal_error_is_reported_once_counted_and_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any) -> None:
        raise KeyError("what nobody thought of")

    server, counters = Server(), OperatorCounters()
    await run_pass(server)
    server.store_status()
    with monkeypatch.context() as patched:
        patched.setattr(module, "plan", wrong)
        for _ in range(2):
            with pytest.raises(KeyError):
                await run_pass(server, counters)
            server.body["status"] = server.applied[-1]["status"]
    assert counters.internal_errors == 2
    assert server.managers == [*["pseudoreal-operator"] * 2, "pseudoreal-operator-errors"], "it is not written again"
    said = server.condition("Progressing")
    assert (said["status"], said["reason"]) == ("False", "InternalError")
    assert "KeyError: 'what nobody thought of'" in said["message"]


async def test_endless_plan_leaves_its_job_alone_until_the_spec_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def endless(*_: Any) -> None:
        while True:
            pass

    server = Server()
    deps = Dependencies(
        cast(Api, server),
        SETTINGS,
        ReportStore(),
        OperatorCounters(),
        FakeRecorder(),
        planning_thread=PlanningThread(0.1),
    )
    callbacks, name, before = (
        Callbacks(lambda _after: None, lambda _body: None),
        Name("default", "good"),
        count_overruns(),
    )
    with monkeypatch.context() as patched:
        patched.setattr(module, "plan", endless)
        assert await reconcile(deps, name, callbacks) == 60
        wait = await reconcile(deps, name, callbacks)
        assert wait is not None
        assert 50 < wait < 60, "the plan is not tried again"
    assert count_overruns() == before + 1
    assert server.managers == ["pseudoreal-operator-errors"]
    said = server.condition("Progressing")
    assert (said["status"], said["reason"]) == ("False", "Unplannable")
    assert "took more than 0.1 s of processor time" in said["message"]
    assert deps.counters.internal_errors == 0
    server.body["metadata"]["generation"] = 2
    assert await reconcile(deps, name, callbacks) is None
    assert server.condition("Progressing")["reason"] == "Starting"


def count_overruns() -> float:
    found = REGISTRY.get_sample_value("pseudoreal_plan_overruns_total")
    assert found is not None
    return found


async def test_deletion_of_a_job_is_noticed_while_the_job_is_left_alone() -> None:
    server = Server()
    deps = Dependencies(cast(Api, server), SETTINGS, ReportStore(), OperatorCounters(), FakeRecorder())
    deps.overrun_backoff.record("one", 1)
    server.body["metadata"]["deletionTimestamp"] = "now"
    with pytest.raises(JobDeleted):
        await reconcile(deps, Name("default", "good"), Callbacks(lambda _after: None, lambda _body: None))


async def test_status_of_another_release_is_reported_unreadable_and_left_unchanged() -> None:
    server, counters = Server(), OperatorCounters()
    server.body["status"] = {"phases": [{"name": "pseudo", "state": ["of", "another", "type"]}]}
    with pytest.raises(ValueError, match="state"):
        await run_pass(server, counters)
    (written,) = server.applied
    assert written["status"].keys() == {"conditions"}
    assert server.condition("Progressing")["reason"] == "Unreadable"
    assert counters.internal_errors == 1


@pytest.mark.parametrize(
    ("manager", "is_ours"), [("kueue.x-k8s.io/multikueue", False), ("pseudoreal.dev/operator", True)]
)
async def test_job_managed_by_another_controller_is_left_alone(manager: str, is_ours: bool) -> None:
    server = Server()
    server.body["spec"]["managedBy"] = manager
    await run_pass(server)
    assert (bool(server.applied), server.requests > 1) == (is_ours, is_ours), "only the job itself is read"


async def test_unserved_gang_scheduler_blocks_the_job_with_a_sentence() -> None:
    server = Server()
    server.body["spec"]["scheduling"] = {"gang": {"policy": "Volcano"}}
    server.reject("PodGroup", ApiException(status=404, reason="Not Found", body="404 page not found"))
    assert await run_pass(server)
    said = server.condition("Progressing")
    assert said["reason"] == "Blocked"
    assert "has no PodGroup of scheduling.volcano.sh/v1beta1" in said["message"]
    assert "Job" not in {manifest["kind"] for manifest in server.created}
