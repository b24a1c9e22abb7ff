"""Hostile tenants, writing anything accepted by the API server, beside a tenant whose jobs must still be served.

An operator watches two namespaces. Hypothesis draws the actions of tenants in the first one: jobs that are deep, huge,
costly to plan or at the limits of their numbers, ownerless pods with an operator's labels, pods ending with any
message, and a namespace unable to store events. After each draw, the operator must be the same process with all its
tasks, must have used little memory, and must serve a new job in the second namespace within seconds.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kubernetes import client
from pseudoreal_api.base import GROUP, PLURAL, VERSION
from pseudoreal_api.names import LABEL_EXECUTION, LABEL_JOB, LABEL_JOB_UID, LABEL_PHASE, LABEL_STAGE
from pseudoreal_api.status.status import PseudoRealJobStatus

from tests.support.cluster import Cluster, Job
from tests.support.depth import DEPTH
from tests.support.installed import make_namespace
from tests.support.jobs import good_job
from tests.support.operator_process import Operator
from tests.support.patience import wait_for

# Solo, because it judges how long a job of another tenant waits.
pytestmark = [pytest.mark.integration, pytest.mark.solo]

Json = dict[str, Any]
SERVED_SECONDS = 5.0
"""Maximal seconds from the creation of a job to its first Job and its status, during the tenants' actions."""
MEMORY_LIMIT = 512 * 2**20
"""The chart's memory limit for an operator, in bytes."""
WEBHOOK = "no-events"
_ADMISSION = "admissionregistration.k8s.io/v1"
_numbers = count()


@dataclass
class Tenants:
    """The operator, the hostile tenants' namespace, and the other one."""

    admin: client.ApiClient
    operator: Operator
    tenants: Cluster
    served: Cluster
    pid: int = 0
    watchers: int = 0
    """Number of watch tasks at the start."""
    seconds: list[float] = field(default_factory=list)
    has_webhook: bool = False
    """Whether the API server refuses every event of the tenants' namespace."""

    def post(self, path: str, text: str) -> bool:
        """Create an object from text, possibly nested deeper than Python's JSON encoder supports; return whether the
        API server accepted it."""
        url = f"{self.admin.configuration.host}{path}"
        headers = {"Content-Type": "application/json"}
        answer = self.admin.rest_client.pool_manager.request("POST", url, body=text.encode(), headers=headers)
        assert answer.status in (201, 400, 403, 409, 413, 422, 500), (answer.status, answer.data[:300])
        return bool(answer.status == 201)

    def create_job(self, text: str) -> bool:
        return self.post(f"/apis/{GROUP}/{VERSION}/namespaces/{self.tenants.namespace}/{PLURAL}", text)

    def create_pod(self, text: str) -> bool:
        return self.post(f"/api/v1/namespaces/{self.tenants.namespace}/pods", text)

    def serve(self) -> None:
        """Assert timely service of a job in the other namespace: its Job and its status."""
        name, begin = f"served-{next(_numbers)}", time.monotonic()
        job = self.served.create(name)
        job.wait("a job of another tenant is served", lambda status: status.state == "Training")
        assert job.children("apis/batch/v1 jobs")
        self.seconds.append(time.monotonic() - begin)
        assert self.seconds[-1] <= SERVED_SECONDS
        job.event("Accepted")
        self.served.delete_job(name)

    def check(self) -> None:
        assert self.operator.is_running
        assert self.operator.process is not None
        assert self.operator.process.pid == self.pid, "it was not restarted"
        # Fails where a watch, a worker or any other task has ended.
        health = self.operator.health()
        assert (health["internal_errors"], health["watchers"]) == (0, self.watchers)
        assert self.peak_memory() < 0.9 * MEMORY_LIMIT
        begin = time.time()
        assert self.create_pod(json.dumps(foreign_pod("nobody", 0, "", "1")))
        wait_for("the watch of the tenants' pods", lambda: self.last_pod_event() >= begin, self.operator.said, 20)

    def last_pod_event(self) -> float:
        """Return the time of the last event on the watch of the tenants' pods, in seconds since 1970."""
        labels = frozenset({("kind", "Pod"), ("namespace", self.tenants.namespace)})
        return self.operator.metrics()["pseudoreal_watch_last_event_timestamp_seconds", labels]

    def peak_memory(self) -> int:
        """Return the peak memory of the operator's process in bytes."""
        status = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

    def clean(self) -> None:
        self.tenants.delete_jobs()
        core = client.CoreV1Api(self.admin)
        core.delete_collection_namespaced_pod(self.tenants.namespace, grace_period_seconds=0)
        if self.has_webhook:
            client.AdmissionregistrationV1Api(self.admin).delete_validating_webhook_configuration(WEBHOOK)
            self.has_webhook = False


@pytest.fixture(scope="module")
def tenants(
    admin: client.ApiClient,
    operator_kubeconfig: Path,
    tls: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Tenants]:
    first, second = (make_namespace(admin, name) for name in ("tenants", "served"))
    operator = Operator(operator_kubeconfig, "tenants,served", tmp_path_factory.mktemp("tenants") / "log", tls)
    operator.start()
    wait_for("the initial list", lambda: operator.lines("initial_list_completed"), operator.said)
    assert operator.process is not None
    yield Tenants(admin, operator, first, second, operator.process.pid, operator.health()["watchers"])
    operator.kill()


# What tenants do.


def job_text(name: str, *, suspended: bool = False, **changes: Any) -> str:
    return json.dumps(good_job(name, spec__suspend=suspended, **changes))


def deep_job(levels: int) -> str:
    """Return a suspended job with a nested pod template."""
    body = good_job(f"deep-{next(_numbers)}", spec__suspend=True, spec__pod={"template": {"spec": "NESTED"}})
    return json.dumps(body).replace('"NESTED"', '{"x":' * levels + "1" + "}" * levels)


def _act_deep(tenants: Tenants, levels: int) -> None:
    tenants.create_job(deep_job(levels))


def _act_big(tenants: Tenants, number: int, size: int, character: str) -> None:
    """Create suspended jobs with many small variables in their template."""
    variables = [{"name": f"V{index}", "value": character} for index in range(size // 40)]
    for _ in range(number):
        spec = {"containers": [{"name": "trainer", "env": variables}]}
        name = f"big-{next(_numbers)}"
        tenants.create_job(job_text(name, suspended=True, spec__pod={"template": {"spec": spec}}))


def _act_untyped(tenants: Tenants, number: int, size: int) -> None:
    """Create suspended jobs with a field unknown to pods in their template."""
    for _ in range(number):
        template: Json = {"spec": {"x": [{}] * (size // 3)}}
        tenants.create_job(job_text(f"untyped-{next(_numbers)}", suspended=True, spec__pod={"template": template}))


def _act_labels(tenants: Tenants, number: int, character: str) -> None:
    body = good_job(f"labels-{next(_numbers)}", spec__suspend=True)
    body["metadata"]["labels"] = {f"tenant.example/{index}": "x" for index in range(number)}
    body["metadata"]["annotations"] = {"tenant.example/text": character * min(number * 10, 200_000)}
    tenants.create_job(json.dumps(body))


def costly_job(workers: int, sequences: int, layers: int, phases: int) -> str:
    every = {"workers": workers, "batch": {"sequences": sequences}}
    every |= {"parallelism": {"schedule": "1F1B", "pipeline": 1}, "elastic": {"minWorkers": 1}}
    body = good_job(f"costly-{next(_numbers)}", spec__suspend=False)
    body["spec"]["model"]["layers"] = layers
    top_k = {"perToken": 1, "balanceOver": "Step", "auxiliaryLoss": "0.01"}
    body["spec"]["model"]["experts"] = {"type": "TopK", "count": 2, "topK": top_k}
    body["spec"]["phases"] = [
        every | {"name": f"p{number}", "until": {"step": 10 * (number + 1)}} for number in range(phases)
    ]
    return json.dumps(body)


def _act_costly(tenants: Tenants, workers: int, sequences: int, layers: int, phases: int) -> None:
    tenants.create_job(costly_job(workers, sequences, layers, phases))


def foreign_pod(uid: str, variables: int, character: str, execution: str) -> Json:
    """Return an ownerless pod with the labels of a job's pod; it is never scheduled."""
    labels = {LABEL_JOB: "served", LABEL_JOB_UID: uid, LABEL_EXECUTION: execution, LABEL_PHASE: "pseudo"}
    env = [{"name": f"V{index}", "value": character} for index in range(variables)]
    container = {"name": "trainer", "image": "none.example/none", "env": env}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"foreign-{next(_numbers)}", "labels": labels | {LABEL_STAGE: "train"}},
        "spec": {"containers": [container], "schedulerName": "none", "terminationGracePeriodSeconds": 0},
    }


def _act_pods(tenants: Tenants, number: int, variables: int, character: str, execution: str) -> None:
    for _ in range(number):
        tenants.create_pod(json.dumps(foreign_pod("somebody", variables, character, execution)))


def _act_no_events(tenants: Tenants) -> None:
    """A webhook that fails for every event of the namespace, and a job with events."""
    if not tenants.has_webhook:
        webhook = json.dumps(_failing_webhook(tenants.tenants.namespace))
        tenants.has_webhook = tenants.post(f"/apis/{_ADMISSION}/validatingwebhookconfigurations", webhook)
    tenants.create_job(job_text(f"untold-{next(_numbers)}"))


def _failing_webhook(namespace: str) -> Json:
    """Return a webhook that nobody answers: the API server refuses events with status 500. A quota would not do,
    because quotas do not count events."""
    rule = {
        "apiGroups": ["", "events.k8s.io"],
        "apiVersions": ["v1"],
        "operations": ["CREATE"],
        "resources": ["events"],
    }
    webhook = {
        "name": "events.example.com",
        "rules": [rule],
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "timeoutSeconds": 1,
        "admissionReviewVersions": ["v1"],
    }
    return {
        "apiVersion": _ADMISSION,
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": WEBHOOK},
        "webhooks": [webhook],
    }


def _act_last_word(tenants: Tenants, message: Json) -> None:
    """Create a job, and end its pod successfully with an arbitrary termination message."""
    name = f"words-{next(_numbers)}"
    if not tenants.create_job(job_text(name)):
        return
    found: list[Json] = wait_for("pods", lambda: tenants.tenants.list("api/v1 pods", f"{LABEL_JOB}={name}"))
    pod = found[0]
    whole = {"outcome": "Succeeded", "phase": "pseudo", "execution": 1, "step": 10, "checkpoint": "pseudo-00000010"}
    ended = {"exitCode": 0, "reason": "Completed", "message": json.dumps(whole | message)}
    status = {"phase": "Succeeded", "containerStatuses": [_status_of_container({"terminated": ended})]}
    tenants.tenants.patch_pod_status(pod["metadata"]["name"], status)
    # The phase is done, or the execution has failed: the job does not stand still for a number.
    Job(tenants.tenants, name).wait("a last word is judged", _is_judged)


def _is_judged(status: PseudoRealJobStatus) -> bool:
    is_done = any(phase.state in ("Complete", "Failed") for phase in status.phases)
    return is_done or status.execution > 1 or status.restarts > 0


def _status_of_container(state: Json) -> Json:
    return {"name": "trainer", "image": "x", "imageID": "", "ready": False, "restartCount": 0, "state": state}


NUMBERS = st.sampled_from([0, -1, 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 10**30, 10**4000, 1e27, 1e308, -1e308, True])
ODD = st.sampled_from(["x", "<", "\u0085", "\u202e", "🏖", "\\", '"', "\ud83c"])
ACTS = st.one_of(
    st.tuples(st.just(_act_deep), st.integers(1, 9_000)),
    st.tuples(st.just(_act_big), st.integers(1, 3), st.integers(100, 1_200_000), ODD),
    st.tuples(st.just(_act_untyped), st.integers(1, 3), st.integers(100, 1_400_000)),
    st.tuples(st.just(_act_labels), st.integers(0, 5_000), ODD),
    st.tuples(
        st.just(_act_costly),
        st.sampled_from([1, 2, 839, 840, 9_973, 10_000]),
        st.sampled_from([1, 840, 8_648_640, 2**31 - 1]),
        st.sampled_from([1, 8, 840, 10_000]),
        st.sampled_from([1, 2, 16]),
    ),
    st.tuples(
        st.just(_act_pods), st.integers(1, 4), st.integers(0, 20_000), ODD,
        st.sampled_from(["1", "0", "-1", "9" * 63, "x", "1e9", "٣"]),
    ),
    st.tuples(st.just(_act_no_events)),
    st.tuples(
        st.just(_act_last_word),
        st.dictionaries(st.sampled_from(["step", "loss", "validationLoss", "tokens", "execution"]), NUMBERS),
    ),
)  # fmt: skip


@settings(
    max_examples=DEPTH.of(6, 300),
    deadline=None,
    derandomize=not DEPTH.is_deep,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@example(acts=[(_act_deep, 2_000)])
@example(acts=[(_act_costly, 10_000, 8_648_640, 8, 1)])
@example(acts=[(_act_untyped, 14, 1_430_000)])
@example(acts=[(_act_pods, 1, 1, "<" * 1_000_000, "1"), (_act_pods, 1, 1, "x", "1")])
@example(acts=[(_act_last_word, {"loss": 1e27})])
@example(acts=[(_act_last_word, {"step": 10**30})])
@given(acts=st.lists(ACTS, min_size=1, max_size=4))
def test_no_tenant_stops_the_operator_for_others(tenants: Tenants, acts: list[tuple[Any, ...]]) -> None:
    try:
        for act, *arguments in acts:
            act(tenants, *arguments)
        tenants.serve()
        tenants.check()
    finally:
        tenants.clean()


@pytest.mark.long
def test_events_of_other_namespaces_are_posted_after_one_namespace_refused_them(tenants: Tenants) -> None:
    """One namespace stores no events for minutes, until more jobs' events than there are workers have been dropped."""
    before = tenants.operator.health()["lost_events"]
    for _ in range(3):
        _act_no_events(tenants)
    wait_for("lost events", lambda: tenants.operator.health()["lost_events"] >= before + 3, tenants.operator.said, 400)
    tenants.serve()
    tenants.check()
    tenants.clean()
