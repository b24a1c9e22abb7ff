"""Waits for a Kubernetes Job."""

import time
from collections.abc import Iterable
from typing import Any

from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.demo.follow import POLL_SECONDS
from pseudoreal_dev.demo.target import NAMESPACE
from pseudoreal_dev.machine import shell
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_dev.machine.progress import progress


def wait_until_complete(kubernetes: Kubernetes, job: str, seconds: float) -> str:
    """Return the log of the Job after its completion. Raises DevError, with the log, if the Job fails or takes too
    long."""
    deadline = time.monotonic() + seconds
    with progress.step(f"waiting for job {job}"):
        while (ended := end_of(kubernetes.find("job", job, f"--namespace={NAMESPACE}"))) != "Complete":
            if ended == "Failed" or time.monotonic() > deadline:
                what = "failed" if ended == "Failed" else f"was not done within {seconds:.0f} s"
                raise DevError(f"job {job} {what}:\n{_said(kubernetes, job)}")
            time.sleep(POLL_SECONDS)
    return _said(kubernetes, job)


def end_of(job: dict[str, Any] | None) -> str | None:
    """Return Complete or Failed; None while the Job runs."""
    conditions: Iterable[dict[str, Any]] = (job or {}).get("status", {}).get("conditions") or []
    return next((c["type"] for c in conditions if c["type"] in ("Complete", "Failed") and c["status"] == "True"), None)


def _said(kubernetes: Kubernetes, job: str) -> str:
    """Return the log of the Job's newest pod, or the reason why there is none."""
    try:
        return kubernetes.run("logs", f"job/{job}", f"--namespace={NAMESPACE}", "--tail=40").rstrip()
    except shell.CommandFailed as error:
        return str(error)
