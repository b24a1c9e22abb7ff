"""`logs` through a real API server, with a kubelet of the test."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from kubernetes import client

from tests.integration.client.conftest import Terminal, make_pods, training
from tests.integration.client.support.kubelet import Kubelet, kubelet
from tests.support.cluster import Cluster, Job
from tests.support.patience import wait_for

pytestmark = pytest.mark.integration


@pytest.fixture
def node(admin: client.ApiClient, cluster: Cluster, tmp_path: Path) -> Iterator[Kubelet]:
    with kubelet(admin, f"node-{cluster.namespace[:40].strip('-')}", tmp_path) as made:
        yield made


@pytest.fixture
def job(make_job: Callable[..., Job], node: Kubelet) -> Job:
    """A job in its second phase, with a log for each pod."""
    made = make_job("llm", training(), spec__phases__1__processesPerWorker=2)
    for index, pod in enumerate(make_pods(made, node=node.node)):
        node.logs[pod["metadata"]["name"]] = [f"{word} from {index}" for word in ("hello", "\x1b[31mred")]
    return made


def test_logs_of_all_pods_have_prefixes(terminal: Terminal, job: Job) -> None:
    assert terminal.says("logs", job.name).splitlines() == [
        "[real e1 rank 0-1] hello from 0",
        "[real e1 rank 0-1] ␛[31mred from 0",
        "[real e1 rank 2-3] hello from 1",
        "[real e1 rank 2-3] ␛[31mred from 1",
    ]


def test_options_rank_and_tail_limit_the_log(terminal: Terminal, job: Job) -> None:
    assert terminal.says("logs", job.name, "--rank", "3", "--tail", "1") == "␛[31mred from 1\n"
    assert terminal("logs", job.name, "--rank", "4").exit_code == 5


def test_option_previous_prints_the_execution_before(terminal: Terminal, job: Job, node: Kubelet) -> None:
    assert terminal("logs", job.name, "--previous").exit_code == 5
    for pod in make_pods(job, execution=2, node=node.node):
        node.logs[pod["metadata"]["name"]] = ["anew"]
    assert "hello from 0" in terminal.says("logs", job.name, "-p")
    assert "[real e2 rank 2-3] anew" in terminal.says("logs", job.name)


def test_option_follow_ends_with_the_job(terminal: Terminal, job: Job, node: Kubelet) -> None:
    """The pods of an execution starting in the meantime are followed too."""
    results: list[Result] = []
    reader = threading.Thread(target=lambda: results.append(terminal("logs", job.name, "-f")))
    reader.start()
    wait_for("followers", lambda: len(node.followed) == 2, lambda: results)
    for pod in make_pods(job, execution=2, node=node.node):
        node.logs[pod["metadata"]["name"]] = ["anew"]
    wait_for("more followers", lambda: len(node.followed) == 4, lambda: results)
    job.cluster.patch_status(job.name, {"state": "Complete", "completionTime": "2030-01-01T00:00:00Z"})
    node.open.set()
    reader.join()
    (result,) = results
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert sorted(lines).count("[real e2 rank 0-1] anew") == 1
    assert lines.count("[real e1 rank 2-3] the end") == 1
    assert len(lines) == 10


def test_an_unreadable_log_does_not_hide_the_others(terminal: Terminal, job: Job, node: Kubelet) -> None:
    (silent, _) = job.pods("llm-real-e1", 2)
    del node.logs[silent["metadata"]["name"]]
    result = terminal("logs", job.name)
    assert "[real e1 rank 2-3] hello from 1" in result.stdout
    assert result.stderr.startswith("[real e1 rank 0-1] ")
    assert result.exit_code == 1


def test_a_pod_that_has_not_started_is_reported(terminal: Terminal, make_job: Callable[..., Job]) -> None:
    job = make_job("llm", training())
    make_pods(job, runs=False)
    result = terminal("logs", job.name)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.count("has not begun: Pending") == 2
