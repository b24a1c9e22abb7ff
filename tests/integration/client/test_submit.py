"""`submit` on a real API server: a refusal comes before anything is stored."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from tests.integration.client.conftest import Terminal, training
from tests.support.cluster import Cluster
from tests.support.jobs import good_job
from tests.support.patience import wait_for

pytestmark = pytest.mark.integration


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., str]:
    def write(*others: Any, **changes: Any) -> str:
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump_all([good_job("llm", **changes), *others], sort_keys=False))
        return str(path)

    return write


def test_a_job_is_created(terminal: Terminal, cluster: Cluster, file: Callable[..., str]) -> None:
    said = terminal.says("submit", file())
    assert f"job llm is created in namespace {cluster.namespace}" in said
    assert cluster.find("llm")


def test_other_objects_are_left_alone(terminal: Terminal, cluster: Cluster, file: Callable[..., str]) -> None:
    result = terminal("submit", file({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}}))
    assert (result.exit_code, "left alone" in result.stderr, "ConfigMap" in result.stderr) == (0, True, True)
    assert cluster.find("llm")


def test_what_is_wrong_in_the_file_is_said_without_asking(user: Terminal, file: Callable[..., str]) -> None:
    path = file(spec__phases__1__until={"step": 5})
    result = user("submit", path)
    assert (result.exit_code, result.stderr.startswith(f"{path}:27:7: spec.phases[real].until.step")) == (78, True)


def test_what_only_the_cluster_finds_wrong_is_said_with_its_place(
    terminal: Terminal, cluster: Cluster, file: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pseudoreal_trainer.cli.job_file.faults_of", lambda _: [])
    path = file(spec__phases__1__until={"step": 5})
    result = terminal("submit", path)
    assert result.exit_code == 78
    assert f"{path}:27:7: spec.phases[real].until.step 5 must be greater than" in result.stderr
    result = terminal("submit", file(spec__modle={"layers": 1}))
    assert result.exit_code == 78
    assert "spec.modle" in result.stderr
    assert cluster.find("llm") is None


def test_a_name_that_is_taken_is_said(terminal: Terminal, file: Callable[..., str]) -> None:
    terminal.says("submit", file())
    result = terminal("submit", file())
    assert (result.exit_code, "there is a PseudoRealJob llm" in result.stderr) == (1, True)


def test_namespaces_that_contradict_each_other_are_refused(terminal: Terminal, file: Callable[..., str]) -> None:
    result = terminal("submit", file(metadata__namespace="elsewhere"))
    assert (result.exit_code, "says namespace elsewhere" in result.stderr) == (1, True)


def test_a_namespace_that_is_not_there_is_named(terminal: Terminal, file: Callable[..., str]) -> None:
    result = terminal("submit", file(), namespace="nowhere")
    assert (result.exit_code, "there is no namespace nowhere" in result.stderr) == (5, True)


def test_who_may_not_create_is_told_whom_to_ask(user: Terminal, file: Callable[..., str]) -> None:
    result = user("submit", file())
    assert (result.exit_code, "ask for the role `edit`" in result.stderr) == (4, True)


@pytest.mark.parametrize(("state", "code"), [("Complete", 0), ("Failed", 1)])
def test_it_waits_for_the_end(
    terminal: Terminal, cluster: Cluster, file: Callable[..., str], state: str, code: int
) -> None:
    def run() -> None:
        wait_for("the job", lambda: cluster.find("llm"))
        cluster.patch_status("llm", training())
        end = {"state": state, "completionTime": "2030-01-01T00:00:00Z", "currentPhase": None}
        told = {"type": state, "status": "True", "reason": "Why", "message": f"It is {state}."}
        told |= {"lastTransitionTime": "2030-01-01T00:00:00Z"}
        cluster.patch_status("llm", end | {"conditions": [told]})

    writer = threading.Thread(target=run)
    writer.start()
    result = terminal("submit", file(), "--wait")
    writer.join()
    assert result.exit_code == code, result.output
    assert f"{state}  It is {state}." in result.stdout


def test_nothing_is_stored_by_the_dry_run(
    terminal: Terminal, cluster: Cluster, file: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pseudoreal_client.cluster.api import Api

    asked: list[bool] = []
    create = Api.create_job

    def seen(self: Api, body: Any, namespace: str, *, dry_run: bool) -> Any:
        made = create(self, body, namespace, dry_run=dry_run)
        asked.append(dry_run)
        assert (cluster.find("llm") is None) == dry_run
        return made

    monkeypatch.setattr(Api, "create_job", seen)
    terminal.says("submit", file())
    assert asked == [True, False]
    assert client.CoreV1Api(cluster.api).list_namespaced_pod(cluster.namespace).items == []
