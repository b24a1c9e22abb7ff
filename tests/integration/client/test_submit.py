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

pytestmark = [pytest.mark.integration, pytest.mark.minors]


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., str]:
    def write(*others: Any, **changes: Any) -> str:
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump_all([good_job("llm", **changes), *others], sort_keys=False))
        return str(path)

    return write


def test_submit_creates_the_job(terminal: Terminal, cluster: Cluster, file: Callable[..., str]) -> None:
    said = terminal.says("submit", file())
    assert f"job llm is created in namespace {cluster.namespace}" in said
    assert cluster.find("llm")


def test_submit_names_the_objects_that_it_does_not_create(
    terminal: Terminal, cluster: Cluster, file: Callable[..., str]
) -> None:
    result = terminal("submit", file({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}}))
    assert (result.exit_code, "left alone" in result.stderr, "ConfigMap" in result.stderr) == (0, True, True)
    assert cluster.find("llm")


def test_faults_of_the_file_are_found_before_any_request(user: Terminal, file: Callable[..., str]) -> None:
    path = file(spec__phases__1__until={"step": 5})
    result = user("submit", path)
    assert (result.exit_code, result.stderr.startswith(f"{path}:27:7: spec.phases[real].until.step")) == (78, True)


def test_faults_found_by_the_cluster_have_line_and_column(
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


def test_submit_of_a_taken_name_is_an_error(terminal: Terminal, file: Callable[..., str]) -> None:
    terminal.says("submit", file())
    result = terminal("submit", file())
    assert (result.exit_code, "there is a PseudoRealJob llm" in result.stderr) == (1, True)


def test_contradicting_namespaces_are_an_error(terminal: Terminal, file: Callable[..., str]) -> None:
    result = terminal("submit", file(metadata__namespace="elsewhere"))
    assert (result.exit_code, "says namespace elsewhere" in result.stderr) == (1, True)


def test_a_missing_namespace_is_an_error(terminal: Terminal, file: Callable[..., str]) -> None:
    result = terminal("submit", file(), namespace="nowhere")
    assert (result.exit_code, "there is no namespace nowhere" in result.stderr) == (5, True)


def test_submit_without_rights_names_the_missing_role(user: Terminal, file: Callable[..., str]) -> None:
    result = user("submit", file())
    assert (result.exit_code, "ask for the role `edit`" in result.stderr) == (4, True)


@pytest.mark.parametrize(("state", "code"), [("Complete", 0), ("Failed", 1)])
def test_option_wait_ends_with_the_job(
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


def test_the_dry_run_stores_nothing(
    terminal: Terminal, cluster: Cluster, file: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pseudoreal.api import Api

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
