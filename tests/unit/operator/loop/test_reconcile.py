"""Passes over a job that has changed since it was read, with an API server that rejects writes, and with bugs of the
operator."""

import json
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from kubernetes.aio.client import ApiException
from pseudoreal_operator.cluster.api import Api, Json, Name
from pseudoreal_operator.loop import reconcile as module
from pseudoreal_operator.loop.event_recorder import EventRecorder
from pseudoreal_operator.loop.planning_thread import PlanningThread
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


def child_job(job: Json) -> Json:
    """Return the running Job of the job's first execution."""
    about = {"job-name": "good", "job-uid": "one", "phase": "real", "stage": "train", "execution": "1"}
    owner = {"kind": "PseudoRealJob", "uid": job["metadata"]["uid"], "controller": True}
    labels = {f"pseudoreal.dev/{key}": value for key, value in about.items()}
    return {"metadata": {"name": "good-real-e1", "labels": labels, "ownerReferences": [owner]}, "status": {"active": 1}}


class Server:
    """A fake API server with one job; records what is applied.

    `rejection`: status code for every status write; `banned`: a status with this text is rejected as invalid;
    `missing`: how many reads of the job answer 404; `gone`: the job does not exist; `lost`: error in place of the
    answer to the first status write, which is stored if `taken`.
    """

    def __init__(
        self,
        rejection: int | None = None,
        child_refusal: ApiException | None = None,
        banned: str | None = None,
        missing: int = 0,
        gone: bool = False,
        lost: Exception | None = None,
        taken: bool = True,
    ) -> None:
        self._refusal, self._child_refusal, self._banned = rejection, child_refusal, banned
        self._refused_kind = ""
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

    async def each(self, kind: str, _namespace: str, _selector: str = "", **_: Any) -> AsyncIterator[Json]:
        self.requests += 1
        for job in self.jobs if kind == "Job" else ():
            yield job

    async def delete(self, _kind: str, _namespace: str, name: str) -> None:
        self.deleted.append(name)

    def refuse(self, kind: str, rejection: ApiException) -> None:
        """Reject children of this kind from now on."""
        self._refused_kind, self._child_refusal = kind, rejection

    def remember(self) -> None:
        """Store the last applied status in the job."""
        self.body["status"] = self.applied[-1]["status"]

    async def create(self, manifest: Json, *, dry_run: bool = False) -> None:
        if dry_run:
            return
        if self._child_refusal and self._refused_kind in ("", manifest["kind"]):
            raise self._child_refusal
        self.created.append(manifest)
        self.order.append(manifest["kind"])

    async def apply(self, manifest: Json, _: str, *, manager: str = "pseudoreal-operator") -> Json:
        self.executions.append(manifest)
        if self._refusal:
            raise ApiException(status=self._refusal, reason="refused")
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


async def _pass(
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


async def test_a_job_that_is_gone_is_gone() -> None:
    with pytest.raises(JobDeleted):
        await _pass(Server(gone=True))


async def test_an_answer_of_404_alone_does_not_end_the_loop_of_a_job() -> None:
    with pytest.raises(ApiException) as refused:
        await _pass(server := Server(missing=1))
    assert refused.value.status == 404
    await _pass(server)
    assert server.applied


async def test_a_job_that_is_being_deleted_is_let_go() -> None:
    server = Server()
    server.body["metadata"]["deletionTimestamp"] = "now"
    with pytest.raises(JobDeleted):
        await _pass(server)


async def test_a_status_is_written_only_on_what_was_read() -> None:
    server = Server()
    wrote: list[Json] = []
    await _pass(server, wrote=wrote)
    assert server.applied[0]["metadata"] == {"name": "good", "namespace": "default", "resourceVersion": "7"}
    assert [written["metadata"]["resourceVersion"] for written in server.applied] == ["7", "7+"]
    assert [body["metadata"]["resourceVersion"] for body in wrote] == ["7+", "7++"]


async def test_a_job_is_accepted_and_starts_in_one_pass_and_its_number_is_safe_before_its_children() -> None:
    server = Server()
    assert await _pass(server) is None
    assert server.requests == 3, "the job, its Jobs and its pods are read once"
    assert [applied["status"]["execution"] for applied in server.applied] == [1, 1]
    assert server.order == ["status", "Service", "NetworkPolicy", "Job", "status"]


async def test_a_status_that_was_not_taken_makes_no_children() -> None:
    server = Server(lost=ApiException(status=409), taken=False)
    with pytest.raises(ApiException):
        await _pass(server)
    assert server.created == []


async def test_a_job_that_ends_is_forgotten_in_the_same_pass() -> None:
    server, report_store = Server(), ReportStore()
    server.body["spec"]["pod"] = {"template": {"spec": {"hostname": "mine"}}}
    assert await _pass(server, report_store=report_store) is None
    assert server.condition("Failed")["status"] == "True"
    assert server.requests == 3
    assert report_store._jobs == {}


async def test_a_job_that_has_ended_waits_for_what_it_deletes() -> None:
    server = Server()
    server.body["spec"]["cleanUp"] = {"children": "Delete"}
    server.body["status"] = {"conditions": [ENDED]}
    server.jobs = [child_job(server.body)]
    assert await _pass(server) is None
    assert server.deleted == ["good-real-e1"]


async def test_a_job_that_ends_and_whose_children_go_is_read_anew() -> None:
    server = Server()
    server.body["spec"] |= {"deadlines": {"ttlSecondsAfterFinished": 0}}
    server.body["spec"]["pod"] = {"template": {"spec": {"hostname": "mine"}}}
    assert await _pass(server) == 0.0


@pytest.mark.parametrize("status", [404, 409, 429, 500])
async def test_a_refused_status_is_for_another_pass(status: int) -> None:
    with pytest.raises(ApiException) as refused:
        await _pass(Server(rejection=status), recorder=(recorder := FakeRecorder()))
    assert refused.value.status == status
    assert recorder.posted == [], "no event is posted for a status that was not written"


async def test_a_status_whose_text_is_refused_is_written_without_it() -> None:
    server, counters = Server(banned="is about to start"), OperatorCounters()
    await _pass(server, counters)
    written, _ = server.applied
    assert (written["status"]["execution"], len(server.executions), counters.refused_statuses) == (1, 3, 1)
    messages = [condition["message"] for condition in written["status"]["conditions"]]
    assert len(messages) == 4
    assert all("refused the text of this condition; the operator's log shows it as text" in m for m in messages)


async def test_a_text_that_was_refused_is_not_tried_again_and_others_are() -> None:
    server, counters = Server(banned="The job can run"), OperatorCounters()
    await _pass(server, counters)
    assert counters.refused_statuses == 1
    messages = {c["type"]: c["message"] for c in server.applied[-1]["status"]["conditions"]}
    assert "refused" in messages["Accepted"]
    assert messages["Progressing"] == "Execution 1 at phase pseudo starts."


async def test_a_status_that_is_refused_without_texts_too_is_an_error() -> None:
    server, counters = Server(banned='"execution"'), OperatorCounters()
    with pytest.raises(ApiException):
        await _pass(server, counters)
    (written,) = server.applied
    assert written["status"].keys() == {"conditions"}
    said = server.condition("Progressing")
    assert (said["status"], said["reason"]) == ("False", "StatusRefused")
    assert "error decoding YAML" in said["message"]
    assert (server.managers, counters.internal_errors) == (["pseudoreal-operator-errors"], 0)
    server.remember()
    with pytest.raises(ApiException):
        await _pass(server, counters)
    assert len(server.applied) == 1, "it is not written again"


async def test_where_not_even_the_answer_is_taken_a_sentence_of_ours_is() -> None:
    server = Server(banned='"execution"')
    server.also_banned = "error decoding"
    with pytest.raises(ApiException):
        await _pass(server)
    assert server.condition("Progressing")["message"].endswith("the operator's log has its answer.")


async def test_a_status_whose_figures_are_refused_is_written_without_them() -> None:
    """The job's Job is gone, and the next execution is announced nevertheless."""
    server, counters = Server(banned="placement"), OperatorCounters()
    server.body["status"] = json.loads(TRAINS)
    await _pass(server, counters)
    status = server.applied[-1]["status"]
    assert "placement" not in status
    assert (status["state"], status["execution"], counters.refused_statuses) == ("Restarting", 2, 2)


@pytest.mark.parametrize("rejection", [413, 500])
async def test_a_status_that_is_too_large_is_refused(rejection: int) -> None:
    server = Server(banned="is about to start")
    server.banned_by = ApiException(status=rejection, reason="etcdserver: request is too large")
    await _pass(server)
    assert server.applied[0]["status"]["execution"] == 1


async def test_events_come_after_the_status_that_says_the_same() -> None:
    await _pass(server := Server(), recorder=(recorder := FakeRecorder()))
    assert [event["reason"] for event in recorder.posted] == ["Accepted", "PhaseStarted"]
    assert server.applied[0]["status"]["execution"] == 1


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("error", [ApiException(status=409), TimeoutError(), ApiException(status=504)])
async def test_events_of_a_status_whose_answer_was_lost_are_told_once(error: Exception, taken: bool) -> None:
    recorder = FakeRecorder()
    server = Server(lost=error, taken=taken)
    with pytest.raises(type(error)):
        await _pass(server, recorder=recorder)
    assert recorder.posted == []
    if taken:
        server.remember()
    await _pass(server, recorder=recorder)
    server.remember()
    await _pass(server, recorder=recorder)
    assert [event["reason"] for event in recorder.posted].count("Accepted") == 1


async def test_what_is_held_of_a_job_is_forgotten_with_it() -> None:
    recorder = FakeRecorder()
    with pytest.raises(TimeoutError):
        await _pass(Server(lost=TimeoutError(), taken=True), recorder=recorder)
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
def test_invalid_objects_are_distinguished_from_policies(status: int, said: Json, invalid: bool) -> None:
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
async def test_only_an_invalid_child_ends_a_job_and_others_are_tried_later_and_later(
    status: int, said: Json, state: str
) -> None:
    rejection = ApiException(status=status, body=json.dumps(said))
    server = Server(child_refusal=rejection)
    rejection.headers = {"Retry-After": "77"}
    wait = await _pass(server)
    assert wait == (0.0 if state == "Failed" else 77.0)
    assert server.applied[-1]["status"]["state"] == state
    conditions = server.applied[-1]["status"]["conditions"]
    assert any(said["message"] in condition["message"] for condition in conditions)


async def test_a_mistake_of_ours_is_told_once_counted_and_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any) -> None:
        raise KeyError("what nobody thought of")

    server, counters = Server(), OperatorCounters()
    await _pass(server)
    server.remember()
    with monkeypatch.context() as patched:
        patched.setattr(module, "plan", wrong)
        for _ in range(2):
            with pytest.raises(KeyError):
                await _pass(server, counters)
            server.body["status"] = server.applied[-1]["status"]
    assert counters.internal_errors == 2
    assert server.managers == [*["pseudoreal-operator"] * 2, "pseudoreal-operator-errors"], "it is not written again"
    said = server.condition("Progressing")
    assert (said["status"], said["reason"]) == ("False", "InternalError")
    assert "KeyError: 'what nobody thought of'" in said["message"]


async def test_a_plan_without_an_end_leaves_its_job_alone_until_the_spec_changes(
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
    callbacks, name, before = Callbacks(lambda _after: None, lambda _body: None), Name("default", "good"), overruns()
    with monkeypatch.context() as patched:
        patched.setattr(module, "plan", endless)
        assert await reconcile(deps, name, callbacks) == 60
        wait = await reconcile(deps, name, callbacks)
        assert wait is not None
        assert 50 < wait < 60, "the plan is not tried again"
    assert overruns() == before + 1
    assert server.managers == ["pseudoreal-operator-errors"]
    said = server.condition("Progressing")
    assert (said["status"], said["reason"]) == ("False", "Unplannable")
    assert "took more than 0.1 s of processor time" in said["message"]
    assert deps.counters.internal_errors == 0
    server.body["metadata"]["generation"] = 2
    assert await reconcile(deps, name, callbacks) is None
    assert server.condition("Progressing")["reason"] == "Starting"


def overruns() -> float:
    found = REGISTRY.get_sample_value("pseudoreal_plan_overruns_total")
    assert found is not None
    return found


async def test_a_job_that_is_deleted_is_let_go_whatever_its_plan_costs() -> None:
    server = Server()
    deps = Dependencies(cast(Api, server), SETTINGS, ReportStore(), OperatorCounters(), FakeRecorder())
    deps.overrun_backoff.record("one", 1)
    server.body["metadata"]["deletionTimestamp"] = "now"
    with pytest.raises(JobDeleted):
        await reconcile(deps, Name("default", "good"), Callbacks(lambda _after: None, lambda _body: None))


async def test_a_status_of_another_release_is_said_to_be_unreadable_and_left_as_it_is() -> None:
    server, counters = Server(), OperatorCounters()
    server.body["status"] = {"phases": [{"name": "pseudo", "state": ["of", "another", "type"]}]}
    with pytest.raises(ValueError, match="state"):
        await _pass(server, counters)
    (written,) = server.applied
    assert written["status"].keys() == {"conditions"}
    assert server.condition("Progressing")["reason"] == "Unreadable"
    assert counters.internal_errors == 1


@pytest.mark.parametrize(
    ("manager", "is_ours"), [("kueue.x-k8s.io/multikueue", False), ("pseudoreal.dev/operator", True)]
)
async def test_a_job_of_another_controller_is_left_alone(manager: str, is_ours: bool) -> None:
    server = Server()
    server.body["spec"]["managedBy"] = manager
    await _pass(server)
    assert (bool(server.applied), server.requests > 1) == (is_ours, is_ours), "only the job itself is read"


async def test_a_gang_that_no_scheduler_serves_is_told() -> None:
    server = Server()
    server.body["spec"]["scheduling"] = {"gang": {"policy": "Volcano"}}
    server.refuse("PodGroup", ApiException(status=404, reason="Not Found", body="404 page not found"))
    assert await _pass(server)
    said = server.condition("Progressing")
    assert said["reason"] == "Blocked"
    assert "has no PodGroup of scheduling.volcano.sh/v1beta1" in said["message"]
    assert "Job" not in {manifest["kind"] for manifest in server.created}
