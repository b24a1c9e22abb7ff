"""Jobs unable to run report the cause, and deletion of a job deletes its children."""

from collections.abc import Callable

import pytest
from pseudoreal_dev.cluster.kubectl import Kubernetes

from tests.e2e.support.job import IN_NAMESPACE, Job, wait_for

pytestmark = pytest.mark.e2e


def test_a_missing_corpus_fails_the_job_once_with_a_remedy(start: Callable[..., Job]) -> None:
    job = start("nowhere", spec__data__path="corpus/none")
    status = job.wait_for_end()
    failed = job.condition("Failed")
    assert failed.reason == "InvalidJob"
    assert "data.path" in failed.message
    assert "corpus/none" in failed.message
    assert (status.restarts, len(job.pods())) == (0, 1)


def test_last_words_of_any_kind_stop_no_job(start: Callable[..., Job]) -> None:
    """The texts contain an emoji (once enough to stop a job), invalid UTF-8, and terminal control characters.

    The first execution leaves its text as termination message, the second one only in its log.
    """
    words = r"printf 'GLHF! \360\237\217\226 \377\376 \000 \033[31m end'"
    where = 'case "$PET_RDZV_ID" in *-1) echo /dev/termination-log;; *) echo /dev/stderr;; esac'
    container = {"name": "trainer", "command": ["sh", "-c", f'{words} > "$({where})"; exit 3']}
    overlay = {"spec": {"containers": [container]}}
    job = start("worded", spec__pod={"template": overlay}, spec__restart={"maxRestarts": 1, "backoffSeconds": 0})
    status = job.wait_for_end()
    assert (status.state, status.restarts) == ("Failed", 1)
    assert job.condition("Failed").reason == "RestartsExhausted"
    for reason in ("ExecutionFailed", "Failed"):
        assert "ended with exit code 3: GLHF! 🏖 \ufffd\ufffd ␀ ␛[31m end." in job.told(reason)


def test_deleting_a_job_deletes_its_children(start: Callable[..., Job], kubernetes: Kubernetes) -> None:
    job = start("short-lived")
    job.wait_for_steps("pseudo", 1)
    kubernetes.run("delete", "prj", job.name, IN_NAMESPACE, "--timeout=60s")
    selector = (IN_NAMESPACE, f"--selector=pseudoreal.dev/job-name={job.name}")
    wait_for("the children's end", lambda: not kubernetes.items("jobs,pods,services", *selector))
