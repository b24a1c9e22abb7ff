"""The Python client on a real API server: a job's whole life, and the examples of the docstrings."""

import doctest
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from kubernetes import client as kubernetes
from pseudoreal import (
    AlreadyExists,
    AsyncClient,
    Client,
    Forbidden,
    Job,
    JobDeleted,
    NamespaceConflict,
    NoEffect,
    NotFound,
    Rejected,
    aio,
    client,
    job,
)
from pseudoreal_dev.cluster.control_plane import ControlPlane

from tests.integration.client.conftest import make_pods, training
from tests.integration.client.support.kubelet import Kubelet, kubelet
from tests.support.cluster import Cluster
from tests.support.cluster import Job as StoredJob
from tests.support.jobs import good_job
from tests.support.patience import wait_for
from tests.support.trainer_log import line

pytestmark = pytest.mark.integration

OVER = {"state": "Complete", "completionTime": "2030-01-01T00:00:00Z", "currentPhase": None}
MakeJob = Callable[..., StoredJob]


@pytest.fixture
def kubeconfig(control_plane: ControlPlane, cluster: Cluster, tmp_path: Path) -> str:
    """A kubeconfig whose context names the namespace of the test."""
    config = yaml.safe_load(control_plane.kubeconfig.read_text())
    for context in config["contexts"]:
        context["context"]["namespace"] = cluster.namespace
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    return str(tmp_path / "kubeconfig")


@pytest.fixture
def jobs(kubeconfig: str) -> Client:
    return Client(kubeconfig=kubeconfig)


@pytest.fixture
def node(admin: kubernetes.ApiClient, cluster: Cluster, tmp_path: Path) -> Iterator[Kubelet]:
    with kubelet(admin, f"node-{cluster.namespace[:40].strip('-')}", tmp_path) as made:
        yield made


@pytest.mark.minors
def test_a_job_is_submitted_changed_and_deleted(jobs: Client, cluster: Cluster) -> None:
    made = Job.from_object(good_job("llm"))
    assert jobs.submit(made, dry_run=True).spec.phases[1].name == "real"
    assert cluster.find("llm") is None
    stored = jobs.submit(made)
    assert (stored.metadata.namespace, stored.status.state, bool(stored.metadata.uid)) == (
        jobs.namespace,
        "Pending",
        True,
    )
    assert [one.name for one in jobs.list()] == ["llm"]
    cluster.patch_status("llm", training())
    everywhere = {one.metadata.namespace: one for one in jobs.list(all_namespaces=True) if one.name == "llm"}
    assert jobs.get("llm").status.progress == everywhere[jobs.namespace].status.progress
    assert "frees its pods" in jobs.suspend("llm")
    assert jobs.get("llm").spec.suspend is True
    assert "goes on" in jobs.resume("llm")
    assert "phase real of llm ends at its next step" in jobs.finish_phase("llm")
    assert [request.type for request in jobs.get("llm").spec.requests] == ["FinishPhase"]
    with pytest.raises(NoEffect, match="asks that of phase real already"):
        jobs.finish_phase("llm", "real")
    jobs.delete("llm")
    with pytest.raises(NotFound, match=f"no PseudoRealJob llm in namespace {jobs.namespace}"):
        jobs.get("llm")
    with pytest.raises(NotFound):
        jobs.delete("llm")


@pytest.mark.minors
def test_refusals_are_typed_and_keep_the_servers_sentence(
    jobs: Client, control_plane: ControlPlane, cluster: Cluster
) -> None:
    bad = good_job("llm", spec__phases__1__until={"step": 5})
    with pytest.raises(Rejected, match="the cluster refuses to create PseudoRealJob llm") as rejected:
        jobs.submit(bad)
    assert any("until.step 5 must be greater" in cause for cause in rejected.value.causes)
    assert rejected.value.server_message.startswith('pseudorealjobs.pseudoreal.dev "llm" is forbidden')
    jobs.submit(good_job("llm"))
    with pytest.raises(AlreadyExists):
        jobs.submit(good_job("llm"))
    stranger = Client(namespace=cluster.namespace, kubeconfig=str(control_plane.user("nobody")[1]))
    with pytest.raises(Forbidden, match="ask for the role `view`") as forbidden:
        stranger.get("llm")
    assert 'User "nobody" cannot get resource' in forbidden.value.server_message
    elsewhere = good_job("other", metadata__namespace="elsewhere")
    with pytest.raises(NamespaceConflict, match="the job says namespace elsewhere"):
        Client(namespace=cluster.namespace, kubeconfig=str(control_plane.kubeconfig)).submit(elsewhere)


@pytest.mark.minors
def test_watch_and_wait_follow_the_status(jobs: Client, make_job: MakeJob) -> None:
    made = make_job("llm", training())
    seen: list[str] = []
    reader = threading.Thread(target=lambda: seen.extend(status.state for status in jobs.watch("llm")))
    reader.start()
    wait_for("the first status", lambda: seen)
    made.cluster.patch_status("llm", {"state": "Restarting"})
    assert jobs.wait("llm", until="Restarting", timeout=180).current_phase == "real"
    made.cluster.patch_job("llm", {"metadata": {"labels": {"a": "b"}}})  # no change of the status
    made.cluster.patch_status("llm", OVER)
    assert jobs.wait("llm", timeout=180).state == "Complete"
    reader.join()
    assert seen == ["Training", "Restarting", "Complete"]


def test_a_watched_job_that_is_deleted_is_an_error(jobs: Client, make_job: MakeJob) -> None:
    make_job("llm", training())
    watched = jobs.watch("llm")
    assert next(watched).state == "Training"
    jobs.delete("llm")
    with pytest.raises(JobDeleted):
        next(watched)


def test_metrics_are_the_progress_of_all_executions(jobs: Client, make_job: MakeJob, node: Kubelet) -> None:
    made = make_job("llm", training())
    (first, _), (second, _) = (make_pods(made, execution=number, node=node.node) for number in (1, 2))
    node.logs[first["metadata"]["name"]] = ["torch", line(11, 5.0), line(12, 4.5), line(13, 4.0)]
    node.logs[second["metadata"]["name"]] = [line(13, 3.9), line(14, 3.8)]
    rows = jobs.metrics("llm")
    assert [(row["step"], row["loss"]) for row in rows] == [(11, 5.0), (12, 4.5), (13, 3.9), (14, 3.8)]


def test_logs_are_lines_with_their_pods(jobs: Client, make_job: MakeJob, node: Kubelet) -> None:
    made = make_job("llm", training())
    names = [pod["metadata"]["name"] for pod in make_pods(made, node=node.node)]
    node.logs |= {name: [f"hello from {name}", "bye"] for name in names}
    assert [(one.prefix, one.pod) for one in jobs.logs("llm", tail=1)] == [
        ("[real e1 rank 0] ", names[0]),
        ("[real e1 rank 1] ", names[1]),
    ]
    assert [one.text for one in jobs.logs("llm", rank=1)] == [f"hello from {names[1]}", "bye"]
    with jobs.logs("llm", follow=True) as lines:  # leaving it ends it, although the logs go on
        assert {next(lines).text for _ in range(4)} == {*(f"hello from {name}" for name in names), "bye"}


async def test_asyncio_has_the_same_client(kubeconfig: str, make_job: MakeJob, node: Kubelet) -> None:
    made = make_job("llm", training())
    for pod in make_pods(made, node=node.node):
        node.logs[pod["metadata"]["name"]] = [line(11, 5.0)]
    jobs = AsyncClient(kubeconfig=kubeconfig)
    assert (await jobs.get("llm")).status.state == "Training"
    assert [one.name for one in await jobs.list()] == ["llm"]
    assert [row["loss"] for row in await jobs.metrics("llm")] == [5.0]
    assert len([one async for one in jobs.logs("llm")]) == 2
    assert "frees its pods" in await jobs.suspend("llm")
    assert "goes on" in await jobs.resume("llm")
    assert "real" in await jobs.finish_phase("llm")
    assert "pseudo" in await jobs.repeat_phase("llm", "pseudo")
    made.cluster.patch_status("llm", OVER)
    assert (await jobs.wait("llm", timeout=180)).state == "Complete"
    assert [status.state async for status in jobs.watch("llm")] == ["Complete"]
    await jobs.delete("llm")
    with pytest.raises(NotFound):
        await jobs.get("llm")
    assert (await jobs.submit(Job.from_object(good_job("llm")), dry_run=True)).name == "llm"


EXAMPLES = [
    example
    for module in (client, aio, job)
    for example in doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs={"Job": Job, "Client": Client})
    if example.examples
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name.replace(".", "-"))
def test_example_of_a_docstring_runs(
    example: doctest.DocTest, jobs: Client, kubeconfig: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Examples that create no job find the quickstart."""
    monkeypatch.setenv("KUBECONFIG", kubeconfig)
    source = "".join(part.source for part in example.examples)
    if "submit(" not in source:
        jobs.submit(Job.from_yaml("examples/quickstart.yaml"))
    if ".resume(" in source:
        jobs.suspend("quickstart")
    said: list[str] = []
    # One that fails is shown as doctest shows it.
    result = doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL).run(example, out=said.append)
    assert result.failed == 0, "".join(said)
    assert result.attempted > 0


def test_examples_of_the_document_run(jobs: Client, kubeconfig: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", kubeconfig)
    text = Path("docs/python.md").read_text()
    examples = doctest.DocTestParser().get_doctest(text, {}, "python.md", "docs/python.md", 0)
    said: list[str] = []
    result = doctest.DocTestRunner().run(examples, out=said.append)
    assert result.failed == 0, "".join(said)
    assert result.attempted > 10
    assert jobs.list() == []


def test_each_public_method_with_a_plain_result_has_an_example() -> None:
    found = {example.name.rpartition(".")[2] for example in EXAMPLES}
    assert {"Client", "AsyncClient", "Job", "submit", "list", "watch", "wait", "suspend", "resume", "delete"} <= found
    assert {"validate", "plan"} <= found
