"""`pseudoreal ui` for a cluster: a real API server, and a real browser."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from playwright.sync_api import Browser, Page
from pseudoreal_client.ui.cluster import cluster_jobs
from pseudoreal_dev.cluster.control_plane import ControlPlane
from pseudoreal_trainer.cli.common import ClusterOptions

from tests.integration.client.conftest import Terminal, ago, make_pods, training
from tests.integration.client.support.kubelet import Kubelet, kubelet
from tests.support.browser import Opened
from tests.support.cluster import Cluster, Job
from tests.support.depth import DEPTH
from tests.support.live_page import Live, served
from tests.support.patience import PATIENCE_SECONDS, wait_for
from tests.support.trainer_log import line

pytestmark = [pytest.mark.integration, pytest.mark.browser]

MakeJob = Callable[..., Job]
LIVE_SECONDS = 2.0
"""Seconds within which a change of a job is on the page."""


@pytest.fixture
def live(terminal: Terminal) -> Iterator[Live]:
    options = ClusterOptions(terminal.namespace, None, str(terminal.kubeconfig))
    with served(cluster_jobs(options, everywhere=False)) as live:
        yield live


@pytest.fixture
def node(admin: client.ApiClient, cluster: Cluster, tmp_path: Path) -> Iterator[Kubelet]:
    with kubelet(admin, f"node-{cluster.namespace[:40].strip('-')}", tmp_path) as made:
        yield made


def opened(browser: Browser, live: Live, name: str = "") -> Opened:
    found = Opened(browser, live.url)
    if name:
        link = found.page.get_by_role("link", name=name, exact=True)
        wait_for(name, lambda: link.count() == 1)
        link.click()
        found.page.wait_for_url("**/job/**")
    found.await_true("document.getElementById('connection').hidden")
    return found


def seconds_until(page: Page, what: str, probe: Callable[[], bool]) -> float:
    begin = time.monotonic()
    wait_for(what, probe, page.content, pause=0.02)
    return time.monotonic() - begin


def has_text(page: Page, selector: str, text: str) -> Callable[[], bool]:
    return lambda: text in page.locator(selector).inner_text()


def test_a_job_is_created_changes_and_is_deleted_on_the_list(
    browser: Browser, live: Live, make_job: MakeJob, cluster: Cluster
) -> None:
    found = opened(browser, live)
    page = found.page
    assert page.get_by_text("There are no jobs.").count() == 1
    make_job("llm")
    row = page.get_by_role("row", name="llm")
    assert seconds_until(page, "created", lambda: row.count() == 1) < LIVE_SECONDS
    cluster.patch_status("llm", training())
    assert seconds_until(page, "trains", lambda: "Training" in row.inner_text()) < LIVE_SECONDS
    assert all(text in row.inner_text() for text in ("real", "15 of 20 (75%)", "3.2500", cluster.namespace))
    cluster.patch_status("llm", {"state": "Failed", "completionTime": ago(0), "currentPhase": None})
    assert seconds_until(page, "failed", lambda: "Failed" in row.inner_text()) < LIVE_SECONDS
    cluster.delete_job("llm")
    assert seconds_until(page, "deleted", lambda: row.count() == 0) < LIVE_SECONDS
    assert found.errors == []


def test_the_page_of_a_job_shows_describe_figures_and_commands_live(
    browser: Browser, live: Live, make_job: MakeJob, node: Kubelet, cluster: Cluster, terminal: Terminal
) -> None:
    status = training()
    status["conditions"] = [
        {
            "type": "Progressing",
            "status": "True",
            "reason": "Training",
            "message": "Execution 1 <b>trains</b>.",
            "lastTransitionTime": ago(5),
            "observedGeneration": 1,
        }
    ]
    job = make_job("llm", status)
    first, _ = make_pods(job, node=node.node)
    said = node.logs[first["metadata"]["name"]] = ["not JSON", *(line(step, 9.0 - step / 2) for step in (11, 13))]
    _record_event(job, "WorkerFailed", "pod llm-0 is <i>out of memory</i>")
    found = opened(browser, live, "llm")
    page = found.page
    now = page.locator("main")
    wait_for("the figures", lambda: page.get_by_role("img", name="from 3.5 at step 11 to 2.5 at step 13").count() == 1)
    for text in ("15 of 20 (75%)", "Execution 1 <b>trains</b>.", "pod llm-0 is <i>out of memory</i>", "WorkerFailed"):
        assert text in now.inner_text(), text
    page.get_by_text("Everything that pseudoreal describe says").click()
    described = page.locator("pre").inner_text()
    for text in (node.node, "PHASE", "Conditions:", "Events:"):
        assert text in described
    # The plans of the phases follow from the spec, and the page says what it lacks.
    assert page.locator("#plans svg").count() == 2
    assert "which this page does not read" in now.inner_text()
    assert "The checkpoints are not read here." in page.locator("#checkpoints").inner_text()
    commands = page.locator("#commands")
    where = f"llm -n {cluster.namespace} --kubeconfig {terminal.kubeconfig}"
    assert f"pseudoreal suspend {where}" in commands.inner_text()
    assert f"kubectl delete pseudorealjob {where}" in commands.inner_text()
    assert "Not now: llm is not suspended" in commands.inner_text()

    said.append(line(15, 1.125))
    wait_for("the new step", lambda: page.get_by_role("img", name="to 1.125 at step 15").count() == 1)
    # A fault, and the same steps again from a checkpoint.
    fault = {"execution": 1, "time": ago(0), "reason": "PodFailed", "pod": "llm-1", "node": "gpu-7"}
    cluster.patch_status("llm", {"state": "Restarting", "restarts": 1, "execution": 2, "faults": [fault]})
    assert seconds_until(page, "the restart", has_text(page, "#now", "Restarting")) < LIVE_SECONDS
    assert (
        page.get_by_role("row", name="1 0s ago PodFailed llm-1 gpu-7").or_(page.get_by_text("PodFailed")).count() >= 1
    )
    cluster.patch_job("llm", {"spec": {"suspend": True}})
    asked = has_text(page, "#commands", "Not now: llm is suspended already")
    assert seconds_until(page, "suspended", asked) < LIVE_SECONDS
    cluster.delete_job("llm")
    assert seconds_until(page, "deleted", lambda: page.get_by_role("alert").count() == 1) < LIVE_SECONDS
    assert "This job was deleted" in page.locator("#now").inner_text()
    assert page.locator(".plot canvas").count() > 0, "the rest stays as it was"
    # Another job of the same name has nothing of the one before.
    make_job("llm", training(state="Queued", progress=None))
    assert seconds_until(page, "the new job", has_text(page, "#now", "Queued")) < 2 * LIVE_SECONDS
    assert page.get_by_role("img", name="at step 15").count() == 0
    assert found.errors == []


def _record_event(job: Job, reason: str, message: str) -> None:
    metadata = job.body["metadata"]
    about = {
        "kind": "PseudoRealJob",
        "name": metadata["name"],
        "namespace": metadata["namespace"],
        "uid": metadata["uid"],
    }
    event: Any = {
        "metadata": {"name": f"{metadata['name']}.{reason.lower()}"},
        "involvedObject": about,
        "reason": reason,
        "message": message,
        "type": "Warning",
        "lastTimestamp": ago(3),
    }
    client.CoreV1Api(job.cluster.api).create_namespaced_event(metadata["namespace"], event)


def test_texts_of_a_job_are_texts(browser: Browser, live: Live, make_job: MakeJob, node: Kubelet) -> None:
    attack = "</script><img src=x onerror=window.hit=1>"
    job = make_job("llm", training())
    first, _ = make_pods(job, node=node.node)
    hostile = json.loads(line(11, 2.0)) | {"samples": [{"prompt": attack, "text": attack}], "phase": attack}
    node.logs[first["metadata"]["name"]] = [json.dumps(hostile), line(12, 2.0)]
    _record_event(job, "X", attack)
    fault = {"execution": 1, "time": ago(0), "reason": attack}
    condition = {
        "type": "Progressing",
        "status": "True",
        "reason": "X",
        "message": attack,
        "lastTransitionTime": ago(1),
    }
    job.cluster.patch_status("llm", {"faults": [fault], "conditions": [condition]})
    found = opened(browser, live, "llm")
    wait_for("the text", lambda: found.page.locator("main").inner_text().count(attack) >= 4)
    assert found.page.evaluate("window.hit") is None
    assert found.page.locator("main img, main script").count() == 0
    assert found.errors == []


def test_a_user_without_rights_is_told_which(browser: Browser, user: Terminal) -> None:
    options = ClusterOptions(user.namespace, None, str(user.kubeconfig))
    with served(cluster_jobs(options, everywhere=False)) as live:
        page = opened(browser, live).page
        notice = page.locator("main .notice")
        wait_for("the sentence", lambda: notice.count() == 1)
        assert 'cannot list resource "pseudorealjobs"' in notice.inner_text()
        assert live.ask("/job/team/llm", **live.cookie).status == 404


def test_without_the_right_to_see_pods_the_rest_is_shown(
    browser: Browser, control_plane: ControlPlane, cluster: Cluster, make_job: MakeJob
) -> None:
    job = make_job("llm", training())
    make_pods(job)
    rules: Any = [{"apiGroups": ["pseudoreal.dev"], "resources": ["pseudorealjobs"], "verbs": ["get", "list", "watch"]}]
    rights = client.RbacAuthorizationV1Api(cluster.api)
    role: Any = {"metadata": {"name": "reader"}, "rules": rules}
    rights.create_namespaced_role(cluster.namespace, role)
    binding: Any = {
        "metadata": {"name": "reader"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"},
        "subjects": [{"kind": "User", "name": "reader", "apiGroup": "rbac.authorization.k8s.io"}],
    }
    rights.create_namespaced_role_binding(cluster.namespace, binding)
    kubeconfig = control_plane.user("reader")[1]
    with served(cluster_jobs(ClusterOptions(cluster.namespace, None, str(kubeconfig)), everywhere=False)) as live:
        page = opened(browser, live, "llm").page
        wait_for("pods", has_text(page, "#now", "Pods are not shown"))
        assert "Events are not shown" in page.locator("#now").inner_text()
        assert "15 of 20 (75%)" in page.locator("#now").inner_text()


def test_all_namespaces_and_many_jobs(
    browser: Browser, terminal: Terminal, cluster: Cluster, make_job: MakeJob
) -> None:
    count = DEPTH.of(60, 500)
    for number in range(count):
        make_job(f"job-{number}")
    cluster.patch_status("job-7", training())
    with served(cluster_jobs(ClusterOptions(None, None, str(terminal.kubeconfig)), everywhere=True)) as live:
        found = opened(browser, live)
        page = found.page
        wait_for("the jobs", lambda: page.locator("tbody tr").count() >= count)
        page.get_by_label("Namespace").select_option(cluster.namespace)
        assert page.inner_text("#count").split()[0] == str(count)
        page.get_by_label("State").select_option("Training")
        assert page.locator("tbody tr:visible").count() == 1
        cluster.patch_status("job-8", training())
        rows = page.locator("tbody tr:visible")
        assert seconds_until(page, "one more trains", lambda: rows.count() == 2) < LIVE_SECONDS
        assert found.errors == []
    cluster.delete_jobs()


def test_the_command_prints_an_address_and_ends_by_ctrl_c(
    browser: Browser, terminal: Terminal, make_job: MakeJob
) -> None:
    make_job("llm")
    command = [sys.executable, "-m", "pseudoreal_trainer.cli.command", "ui", "-n", terminal.namespace]
    process = subprocess.Popen(
        [*command, "--kubeconfig", str(terminal.kubeconfig)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith(f"Jobs in namespace {terminal.namespace}: http://127.0.0.1:")
        page = browser.new_page()
        page.goto(said.rpartition(" ")[2].strip())
        wait_for("the job", lambda: page.get_by_role("link", name="llm", exact=True).count() == 1)
        assert process.stdout.readline() == "Ctrl-C ends it.\n"
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        process.kill()
    assert (process.returncode, rest, errors) == (0, "", "")
