"""`get` and `describe` on a real API server, including their errors."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from pseudoreal_api.base import KIND
from pseudoreal_api.kubernetes_requests import COLLECTIONS
from pseudoreal_dev.cluster import binaries

from tests.integration.client.conftest import Terminal, make_pods, training
from tests.support.cluster import Job
from tests.support.names import bare
from tests.support.ports import free_port

pytestmark = pytest.mark.integration

MakeJob = Callable[..., Job]


def test_get_lists_jobs_with_remaining_time(terminal: Terminal, make_job: MakeJob) -> None:
    make_job("fresh")
    make_job("llm", training())
    head, fresh, llm = terminal.says("get").splitlines()
    assert head.split() == ["NAME", "STATE", "PHASE", "STEP", "PROGRESS", "LOSS", "REMAINING", "RESTARTS", "AGE"]
    assert fresh.split()[:4] == ["fresh", "Pending", "-", "-"]
    assert re.fullmatch(r"llm +Training +real +15 +75% +3.2500 +(59m\d+s|1h) +0 +\d+s", llm), llm
    assert "real" in terminal.says("get", "llm", "-o", "wide")
    assert [line.split()[:2] for line in terminal.says("get", "-A").splitlines()[1:]].count(
        [terminal.namespace, "llm"]
    ) == 1


def test_get_prints_whole_objects_as_json_and_yaml(terminal: Terminal, make_job: MakeJob) -> None:
    make_job("llm", training())
    one, listed = (
        json.loads(terminal.says("get", "llm", "-o", "json")),
        yaml.safe_load(terminal.says("get", "-o", "yaml")),
    )
    assert one["status"]["state"] == "Training"
    assert [(body["kind"], body["metadata"]["uid"]) for body in listed["items"]] == [
        (one["kind"], one["metadata"]["uid"])
    ]


def test_describe_shows_the_node_of_each_rank(terminal: Terminal, make_job: MakeJob) -> None:
    job = make_job("llm", training(), spec__phases__1__processesPerWorker=2)
    make_pods(job)
    text = bare(terminal.says("describe", "llm"))
    assert re.search(r"\n  0-1 +llm-real-e1-0-\w{5} +gpu-0 +Running", text), text
    assert re.search(r"\n  2-3 +llm-real-e1-1-\w{5} +gpu-1 +Running", text), text
    assert re.search(r"\n  pseudo +Complete +step 10 +10 +4.2500", text), text


def test_kubectl_plugin_and_kubeconfig_variable_work(terminal: Terminal, make_job: MakeJob) -> None:
    make_job("llm", training())
    kubectl = str(binaries.build("kubectl").path("kubectl"))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"KUBECONFIG": str(terminal.kubeconfig), "PATH": path}
    command = [kubectl, "pseudoreal", "get", "-n", terminal.namespace]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert "llm" in done.stdout, done.stderr


@pytest.mark.parametrize("command", ["get", "describe"])
class TestErrors:
    def test_a_missing_job_is_an_error(self, terminal: Terminal, command: str) -> None:
        result = terminal(command, "nothing")
        assert result.exit_code == 5
        assert f"there is no PseudoRealJob nothing in namespace {terminal.namespace}" in result.stderr
        assert len(result.stderr.splitlines()) == 1

    def test_missing_rights_are_an_error(self, user: Terminal, command: str) -> None:
        result = user(command, "llm")
        assert result.exit_code == 4
        assert 'User "nobody" cannot get' in result.stderr
        assert f"ask for the role `view` in namespace {user.namespace}" in result.stderr

    def test_an_unreachable_cluster_is_an_error(self, terminal: Terminal, command: str, tmp_path: Path) -> None:
        body = yaml.safe_load(terminal.kubeconfig.read_text())
        body["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{free_port()}"
        (tmp_path / "config").write_text(yaml.safe_dump(body))
        result = Terminal(tmp_path / "config", "default")(command, "llm")
        assert result.exit_code == 3
        assert "does not answer" in result.stderr
        assert len(result.stderr.splitlines()) == 1

    @pytest.mark.parametrize("words", [("--context", "nowhere"), ("--kubeconfig", "/nonexistent")])
    def test_a_missing_kubeconfig_or_context_is_an_error(
        self, terminal: Terminal, command: str, words: tuple[str, ...]
    ) -> None:
        terminal = Terminal(Path(words[1]), "default") if words[0] == "--kubeconfig" else terminal
        result = terminal(command, "llm", *words)
        assert result.exit_code == 3
        assert "no cluster is configured" in result.stderr

    def test_a_cluster_without_the_crd_is_an_error(
        self, terminal: Terminal, command: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The API server answers requests for an unknown group as it does without the CRD."""
        monkeypatch.setitem(COLLECTIONS, KIND, ("apis/elsewhere.dev/v1alpha1", "pseudorealjobs"))
        result = terminal(command, "llm")
        assert result.exit_code == 6
        assert "helm install pseudoreal" in result.stderr

    def test_rejected_credentials_are_an_error(self, terminal: Terminal, command: str, tmp_path: Path) -> None:
        body = yaml.safe_load(terminal.kubeconfig.read_text())
        body["users"][0]["user"] = {"token": "wrong"}
        (tmp_path / "config").write_text(yaml.safe_dump(body))
        result = Terminal(tmp_path / "config", "default")(command, "llm")
        assert (result.exit_code, "renew your credentials" in result.stderr) == (4, True)


def test_get_in_a_namespace_without_jobs_prints_a_note(terminal: Terminal) -> None:
    result = terminal("get")
    assert (result.exit_code, result.stdout) == (0, "")
    assert f"there are no jobs in namespace {terminal.namespace}" in result.stderr


def test_a_name_with_all_namespaces_is_a_usage_error(terminal: Terminal) -> None:
    assert terminal("get", "llm", "-A").exit_code == 2
