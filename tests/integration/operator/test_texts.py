"""Arbitrary text from pods, nodes, admission policies and users, on a real API server."""

import asyncio
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kubernetes import client
from pseudoreal_api.base import API_VERSION, KIND
from pseudoreal_api.names import LABEL_JOB_UID
from pseudoreal_api.spec.job import JobMetadata
from pseudoreal_api.wire.messages import TerminationMessage
from pseudoreal_operator import clock
from pseudoreal_operator.cluster.api import Api
from pseudoreal_operator.cluster.login import connect
from pseudoreal_operator.status.events import Event, Reason, shortened, to_manifest
from pseudoreal_operator.untrusted_text import sanitize

from tests.support.cluster import Cluster, Job
from tests.support.depth import DEPTH
from tests.support.patience import wait_for

pytestmark = pytest.mark.integration

Json = dict[str, Any]
TEXTS = {
    "emoji": "Connection reset by peer. GLHF! 🏖️",
    "half": "cut \ud83c",
    "halves": "\udfd6\ud83c",
    "nul": "a\x00b",
    "controls": "\x1b[31mred\x1b[0m\r\x07\x7f\x85\x9f",
    "lines": "one \u2028 two\u2029three \u0085 \n\n\tfour",
    "leftward": "\u200f\u202eabc\u202c",
    "nonchars": "\ufeff\ufffe\uffff",
    "yaml": "---\n&a {x: *a}\n...\n!!python/object:os.system {}\n%YAML 1.2\n- [",
    "template": "{{ .Values }} ${x} %s \\ud83c\\udfd6 \\",
    "json": '{"outcome": "Failed", "phase": [[[',
    "huge": "begin " + "long 🏖️ " * 2**16 + "ValueError: the end",
}
NOW = datetime(2030, 1, 1, tzinfo=UTC)
ONCE: Json = {"spec__restart": {"maxRestarts": 0}}
_numbers = count()


def stored(text: str) -> str:
    """Return the text as the API server stores it: with a replacement character for each lone surrogate."""
    return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)


@pytest.fixture
def ask(operator_kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Function for running a coroutine with the operator's own client and rights."""
    monkeypatch.setenv("KUBECONFIG", str(operator_kubeconfig))

    def run(act: Callable[[Api], Coroutine[Any, Any, None]]) -> None:
        async def connected() -> None:
            async with connect() as api:
                await act(api)

        asyncio.run(connected())

    return run


@pytest.fixture(scope="module")
def texts() -> st.SearchStrategy[str]:
    return st.text(st.characters(exclude_categories=[]), max_size=200)


@settings(max_examples=DEPTH.of(40, 1000), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_written_is_read_as_it_was_meant(
    cluster: Cluster, ask: Callable[..., None], texts: st.SearchStrategy[str], data: st.DataObject
) -> None:
    """Covers unsanitized texts, too."""
    _write_and_check(cluster, ask, data.draw(texts))


@pytest.mark.parametrize("kind", sorted(TEXTS.keys() - {"huge"}))
def test_known_texts_are_read_as_they_were_meant(kind: str, cluster: Cluster, ask: Callable[..., None]) -> None:
    _write_and_check(cluster, ask, TEXTS[kind])


def _write_and_check(cluster: Cluster, ask: Callable[..., None], text: str) -> None:
    name = f"texts-{next(_numbers)}"
    job = cluster.create(name)
    ask(lambda api: _write(api, job, text))
    assert job.condition("Progressing")["message"] == stored(text)
    policies = cluster.list("apis/networking.k8s.io/v1 networkpolicies")
    (child,) = [policy for policy in policies if policy["metadata"]["name"] == name]
    assert child["metadata"]["annotations"]["text"] == stored(text)
    (event,) = job.events()
    assert event.get("message", "") == stored(text)


async def _write(api: Api, job: Job, text: str) -> None:
    """Write a status, a child and an event with the text."""
    metadata: Json = {"name": job.name, "namespace": job.cluster.namespace}
    condition = {"type": "Progressing", "status": "True", "reason": "Training", "message": text}
    condition["lastTransitionTime"] = clock.to_text(NOW)
    head = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata}
    await api.apply(head | {"status": {"conditions": [condition]}}, "status")
    uid = job.body["metadata"]["uid"]
    labels = {LABEL_JOB_UID: uid}
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": job.name, "uid": uid, "controller": True}
    spec = {"podSelector": {"matchLabels": labels}}
    child = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "spec": spec}
    ours: Json = {"labels": labels, "ownerReferences": [owner], "annotations": {"text": text}}
    await api.create(child | {"metadata": metadata | ours})
    named = JobMetadata(**metadata, uid=uid, generation=1)
    await api.post(to_manifest(Event(Reason.FAILED, text, stage=0, execution=1), named, NOW, "test"))


@pytest.mark.usefixtures("shared_operator")
def test_no_last_words_of_a_pod_stop_its_job(cluster: Cluster) -> None:
    """The texts are used as raw termination messages, and as messages of a trainer."""
    raw = {kind: cluster.create(f"raw-{kind}", **ONCE) for kind in TEXTS}
    told = {kind: cluster.create(f"told-{kind}", **ONCE) for kind in TEXTS.keys() - {"huge"}}
    for kind, job in raw.items():
        (pod,) = job.run(f"{job.name}-pseudo-e1")
        job.end_with(pod, 1, TEXTS[kind])
    for kind, job in told.items():
        (pod,) = job.run(f"{job.name}-pseudo-e1")
        message = TerminationMessage(outcome="Failed", phase="pseudo", execution=1, message=stored(TEXTS[kind]))
        job.end_with(pod, 1, message.to_json())
    for kind, job in [*raw.items(), *told.items()]:
        _check_end(job, sanitize(stored(TEXTS[kind])))


def _check_end(job: Job, words: str) -> None:
    job.wait("the end", lambda status: status.state == "Failed")
    failed = job.condition("Failed")
    assert failed["reason"] == "RestartsExhausted"
    shown = sanitize(words.strip(), 600).rstrip(".")
    assert f"ended with exit code 1: {shown}." in failed["message"], job.name
    assert job.event("Failed")["message"] == shortened(failed["message"])


@pytest.mark.usefixtures("shared_operator")
def test_no_number_of_a_pod_stops_its_job(cluster: Cluster) -> None:
    """A message with numbers beyond the limits of a status is not taken for a trainer's; it is shown as text."""
    numbers = {"step": 10**30, "tokens": -1, "checkpoint": "x" * 1000}
    jobs = {}
    for key, value in numbers.items():
        job = jobs[key] = cluster.create(f"numbers-{key}", **ONCE)
        (pod,) = job.run(f"{job.name}-pseudo-e1")
        message = TerminationMessage(outcome="Failed", phase="pseudo", execution=1, message="no more").to_dict()
        job.end_with(pod, 1, str(message | {key: value}).replace("'", '"').replace("False", "false"))
    for key, job in jobs.items():
        job.wait("the end", lambda status: status.state == "Failed")
        assert f'"{key}": ' in job.condition("Failed")["message"]


@pytest.mark.usefixtures("shared_operator")
def test_no_obstacle_of_a_pod_stops_its_job(cluster: Cluster) -> None:
    """Such obstacles come from the kubelet and the scheduler; their reason can be any text too."""
    jobs = {kind: cluster.create(f"waits-{kind}") for kind in TEXTS.keys() - {"huge"}}
    for kind, job in jobs.items():
        (pod,) = job.pods(f"{job.name}-pseudo-e1")
        job.keep_waiting(pod, {"reason": "CreateContainerError", "message": TEXTS[kind]})
    unplaced = cluster.create("unplaced")
    (pod,) = unplaced.pods("unplaced-pseudo-e1")
    says = {"reason": "No\nword 🏖️ " * 500, "message": TEXTS["huge"]}
    cluster.patch_pod_status(
        pod["metadata"]["name"], {"conditions": [{"type": "PodScheduled", "status": "False"} | says]}
    )
    for kind, job in jobs.items():
        shown = sanitize(stored(TEXTS[kind])).rstrip(". ")

        def is_told(job: Job = job, shown: str = shown) -> bool:
            return shown in job.condition("Progressing")["message"]

        wait_for(f"the obstacle {kind}", is_told)
    wait_for("the odd reason", lambda: "ValueError: the end" in unplaced.condition("Progressing")["message"])
    assert unplaced.condition("Progressing")["reason"].startswith("Noword")


@pytest.mark.usefixtures("shared_operator")
def test_texts_of_a_user_reach_the_pods(cluster: Cluster) -> None:
    texts = {kind: text for kind, text in TEXTS.items() if kind not in ("nul", "huge")}
    env = [{"name": f"TEXT_{kind.upper()}", "value": text} for kind, text in texts.items()]
    template = {"metadata": {"annotations": {"example.org/text": "|".join(texts.values())}}}
    job = cluster.create("worded", spec__pod={"env": env, "template": template})
    (pod,) = job.run("worded-pseudo-e1")
    found = {entry["name"]: entry["value"] for entry in pod["spec"]["containers"][0]["env"] if "value" in entry}
    assert {kind: found[f"TEXT_{kind.upper()}"] for kind in texts} == {k: stored(v) for k, v in texts.items()}
    assert pod["metadata"]["annotations"]["example.org/text"] == stored("|".join(texts.values()))


@pytest.mark.usefixtures("shared_operator")
def test_the_words_of_a_policy_are_told(cluster: Cluster) -> None:
    words = "no jobs today 🏖️\u2028\u200f!! &a"
    _forbid_jobs(cluster, words)
    job = cluster.create("forbidden")
    job.wait("the refusal", lambda status: any(words in c.message for c in status.conditions))
    assert job.condition("Progressing")["reason"] == "Blocked"


def _forbid_jobs(cluster: Cluster, words: str) -> None:
    """Forbid the creation of Jobs in the test's namespace, with the given message."""
    policies = client.AdmissionregistrationV1Api(cluster.api)
    name: Any = {"name": cluster.namespace}
    rule = {"apiGroups": ["batch"], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["jobs"]}
    spec: Json = {"failurePolicy": "Fail", "validations": [{"expression": "false", "message": words}]}
    spec["matchConstraints"] = {"resourceRules": [rule]}
    policy: Any = {"metadata": name, "spec": spec}
    policies.create_validating_admission_policy(policy)
    chosen = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": cluster.namespace}}}
    bound: Json = {"policyName": cluster.namespace, "validationActions": ["Deny"], "matchResources": chosen}
    binding: Any = {"metadata": name, "spec": bound}
    policies.create_validating_admission_policy_binding(binding)
    wait_for("the policy", lambda: _is_forbidden(cluster))


def _is_forbidden(cluster: Cluster) -> bool:
    container = {"name": "c", "image": "none"}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    probe: Any = {"metadata": {"name": "probe"}, "spec": {"template": template}}
    try:
        client.BatchV1Api(cluster.api).create_namespaced_job(cluster.namespace, probe, dry_run="All")
    except client.ApiException as error:
        return bool(error.status == 422)
    return False
