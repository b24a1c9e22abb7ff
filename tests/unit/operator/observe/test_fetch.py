"""Listed objects that belong to the job, and objects that do not."""

from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from kubernetes.aio.client import ApiException
from pseudoreal_api.names import CONTAINER
from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_api.wire.reports import PodReport
from pseudoreal_operator import clock
from pseudoreal_operator.cluster.api import Api, Json
from pseudoreal_operator.cluster.bounds import Unreadable
from pseudoreal_operator.observe.fetch import observe
from pseudoreal_operator.observe.memory import Memory
from pseudoreal_operator.observe.report_store import ReportingPod, ReportStore
from pseudoreal_operator.observe.sightings import Sightings
from pseudoreal_operator.observe.stages import Execution, StageKind, pending_phases
from pseudoreal_operator.observe.termination_messages import TerminationMessages
from pseudoreal_operator.observe.view import Observed, ended_at

from tests.unit.operator.observe.support.reports import PODS
from tests.unit.operator.support.world import UID, make_job

CLAIM = {"retentionPolicy": "Delete"}


class Server:
    """A fake API server with the given lists, and one claim with its events, or with a refusal to list them."""

    def __init__(
        self, claim: Json | None = None, events: list[Json] | Exception | None = None, **listed: list[Json]
    ) -> None:
        self._claim, self._events, self._listed = claim, events or [], listed
        self.asked: list[str] = []
        self.unreadable: list[Json] = []

    async def find(self, kind: str, *_: str) -> Json | None:
        self.asked.append(kind)
        return self._claim

    async def first_of(self, kind: str, _namespace: str, fields: str, _most: int) -> list[Json]:
        self.asked.append(f"{kind} {fields}")
        if isinstance(self._events, Exception):
            raise self._events
        return self._events

    async def each(
        self,
        kind: str,
        _namespace: str,
        selector: str,
        *,
        skipped: Callable[[Json, Unreadable], None],
        listed: Callable[[str], object],
    ) -> AsyncIterator[Json]:
        listed("7")
        self.asked.append(f"{kind} {selector}")
        for body in self.unreadable:
            skipped(body, Unreadable("TooDeep", "it is deep"))
        for body in self._listed.get(kind, []):
            yield body


async def observe_with(
    server: Server, status: PseudoRealJobStatus | None = None, memory: Memory | None = None
) -> Observed:
    job = make_job(spec__checkpoint__storage={"volume": CLAIM})
    at = status or PseudoRealJobStatus(execution=1, phases=pending_phases(job.spec))
    return await observe(
        cast(Api, server), ReportStore(), TerminationMessages(), Sightings(), job, at, datetime.now(UTC), memory=memory
    )


def child_job(name: str, execution: int, **status: Any) -> Json:
    labels = {"job-uid": UID, "phase": "pseudo", "stage": "train", "execution": str(execution)}
    return labelled(name, **labels) | {"status": status}


ENDED = [{"type": "Failed", "status": "True"}]


def labelled(name: str, **labels: str) -> dict[str, Any]:
    owners = [{"kind": "PseudoRealJob", "uid": labels.get("job-uid"), "controller": True}]
    named = {f"pseudoreal.dev/{key}": value for key, value in labels.items()}
    return {"metadata": {"name": name, "labels": named, "ownerReferences": owners}}


async def test_existing_claim_is_used() -> None:
    found = await observe_with(Server(claim={"metadata": {"name": "sim-checkpoints"}}))
    assert ("PersistentVolumeClaim", "sim-checkpoints") in found.existing
    assert found.objects_of_deleted_job == ()


def pending_pod(node: str = "") -> Json:
    body = labelled("sim-pseudo-e1-0", **{"job-uid": UID, "phase": "pseudo", "stage": "train", "execution": "1"})
    body["metadata"]["ownerReferences"] = [{"kind": "Job", "uid": "0", "controller": True}]
    return body | {"spec": {"nodeName": node} if node else {}, "status": {"phase": "Pending"}}


def pending_claim(**spec: Any) -> Json:
    wanted = {"accessModes": ["ReadWriteMany"], "storageClassName": "standard"} | spec
    return {"metadata": {"name": "sim-checkpoints", "uid": "7"}, "spec": wanted, "status": {"phase": "Pending"}}


async def test_claim_is_read_before_pods_are_made_for_it() -> None:
    server = Server(claim=pending_claim())
    found = await observe_with(server)
    assert [(claim.name, claim.modes) for claim in found.claims] == [("sim-checkpoints", ("ReadWriteMany",))]
    assert [what for what in server.asked if what.startswith("Event")] == []
    (absent,) = (await observe_with(Server())).claims
    assert (absent.name, absent.phase, absent.modes) == ("sim-checkpoints", "Missing", ())


async def test_claim_of_a_pod_without_a_node_is_read_with_its_newest_warning() -> None:
    events = [{"type": "Warning", "reason": "ProvisioningFailed", "message": "Only support ReadWriteOnce access mode"}]
    server = Server(claim=pending_claim(), events=events, Job=[child_job("sim-pseudo-e1", 1)], Pod=[pending_pod()])
    (claim,) = (await observe_with(server)).claims
    assert claim.complaint == "ProvisioningFailed: Only support ReadWriteOnce access mode"
    assert server.asked[-2:] == ["PersistentVolumeClaim", "Event involvedObject.uid=7"]
    placed = Server(claim=pending_claim(), Job=[child_job("sim-pseudo-e1", 1)], Pod=[pending_pod("node-1")])
    assert (await observe_with(placed)).claims == ()
    assert len(placed.asked) == 2, "and costs no request once the pod has a node"


@pytest.mark.parametrize("refusal", [ApiException(status=403), Unreadable("TooLarge", "it has 9 MiB")])
async def test_events_that_cannot_be_read_hide_no_claim(refusal: Exception) -> None:
    server = Server(claim=pending_claim(), events=refusal, Job=[child_job("sim-pseudo-e1", 1)], Pod=[pending_pod()])
    (claim,) = (await observe_with(server)).claims
    assert (claim.storage_class, claim.complaint) == ("standard", "")


async def test_failing_api_server_is_not_taken_for_a_claim_without_events() -> None:
    failed = ApiException(status=503)
    server = Server(claim=pending_claim(), events=failed, Job=[child_job("sim-pseudo-e1", 1)], Pod=[pending_pod()])
    with pytest.raises(ApiException):
        await observe_with(server)


async def test_claim_of_a_deleted_job_is_reported() -> None:
    found = await observe_with(Server(claim=labelled("sim-checkpoints", **{"job-uid": "another"})))
    assert (found.existing, found.objects_of_deleted_job) == (frozenset(), ("sim-checkpoints",))


async def test_labelled_object_of_others_is_no_child() -> None:
    execution = {"phase": "real", "stage": "train", "execution": "1"}
    own, old = labelled("own", **{"job-uid": UID}, **execution), labelled("old", **{"job-uid": "another"}, **execution)
    found = await observe_with(Server(Job=[own, old, labelled("evaluation", **{"job-name": "sim"})]))
    assert [job.name for job in found.jobs] == ["own"]
    assert (found.existing, found.objects_of_deleted_job) == (frozenset({("Job", "own")}), ("old",))


async def test_observing_a_running_job_takes_two_requests() -> None:
    server = Server(Job=[child_job("sim-pseudo-e1", 1)])
    found = await observe_with(server)
    assert server.asked == ["Job pseudoreal.dev/job-name=sim", "Pod pseudoreal.dev/job-name=sim"]
    assert ("PersistentVolumeClaim", "sim-checkpoints") in found.existing, "it was made before the Job"


async def test_pods_of_ended_executions_are_not_listed() -> None:
    over = child_job("sim-pseudo-e1", 1, conditions=ENDED)
    ending = [child_job("sim-pseudo-e2", 2, conditions=ENDED, terminating=1), child_job("sim-pseudo-e3", 3, active=2)]
    present = child_job("sim-pseudo-e4", 4, conditions=ENDED)
    server = Server(Job=[over, *ending, present])
    await observe_with(server, PseudoRealJobStatus(execution=4, phases=pending_phases(make_job().spec)))
    selector = "pseudoreal.dev/job-name=sim,batch.kubernetes.io/job-name notin (sim-pseudo-e1)"
    assert server.asked[1] == f"Pod {selector}"


async def test_end_of_a_pod_is_not_before_its_last_report() -> None:
    """The clock of the pod's node is slow."""
    job, store, now = make_job(), ReportStore(), datetime.now(UTC).replace(microsecond=0)
    key, execution = ("default", UID), Execution("pseudo", StageKind.TRAIN, 1)
    store.follow(key, PODS)
    reported = now - timedelta(seconds=2)
    store.store(ReportingPod(key, execution, 0, "sim-pseudo-e1-0"), PodReport(), reported)
    ended = {"exitCode": 1, "finishedAt": clock.to_text(now - timedelta(seconds=40))}
    state = {"containerStatuses": [{"name": CONTAINER, "state": {"terminated": ended}}]}
    server = Server(Job=[child_job("sim-pseudo-e1", 1)], Pod=[pending_pod("node-1") | {"status": state}])
    status = PseudoRealJobStatus(execution=1, phases=pending_phases(job.spec))
    found = await observe(cast(Api, server), store, TerminationMessages(), Sightings(), job, status, now)
    (pod,) = found.pods
    assert ended_at(pod, now) == reported


async def test_unreadable_object_of_others_is_ignored() -> None:
    server = Server()
    foreign = labelled("theirs", **{"job-uid": UID})
    del foreign["metadata"]["ownerReferences"]
    server.unreadable = [foreign, {"metadata": {}}, {"metadata": {"name": "bare"}}]
    found = await observe_with(server)
    assert (found.jobs, found.pods, found.objects_of_deleted_job) == ((), (), ())


async def test_unreadable_object_is_there() -> None:
    memory, server = Memory(), Server()
    watched = memory.watch("Pod", None)
    watched.list_again().finish("5")
    watched.connected()
    metadata = {"namespace": "default", "name": "pod", "uid": "pod", "labels": {"pseudoreal.dev/job-name": "sim"}}
    memory.child_changed("Pod", "ADDED", {"metadata": metadata | {"resourceVersion": "6"}})
    server.unreadable = [{"metadata": metadata | {"resourceVersion": "6"}}]
    await observe_with(server, memory=memory)
    assert memory.is_current("Pod", ("default", "sim"))
    server.unreadable.clear()
    await observe_with(server, memory=memory)
    assert not memory.is_current("Pod", ("default", "sim"))


async def test_unreadable_child_of_the_job_raises() -> None:
    server = Server()
    server.unreadable = [child_job("sim-pseudo-e1", 1)]
    with pytest.raises(Unreadable, match="sim-pseudo-e1, which belongs to it, cannot be read: it is deep"):
        await observe_with(server)
