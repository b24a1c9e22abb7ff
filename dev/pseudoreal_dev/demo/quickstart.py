"""examples/quickstart.yaml on a cluster: training on bytes with one worker, then with two."""

from typing import Any

import yaml

from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.demo import job_logs, report
from pseudoreal_dev.demo.target import NAMESPACE, Target
from pseudoreal_dev.demo.training import show, train, wait_until_gone
from pseudoreal_dev.demo.volumes import create_host_volume
from pseudoreal_dev.machine import paths
from pseudoreal_dev.machine.progress import progress

FILE = paths.REPOSITORY / "examples" / "quickstart.yaml"
JOB = "quickstart"


def run(target: Target) -> None:
    """Run the demo. Raises DevError if the job does not succeed."""
    apply(target.kubernetes, on_host_volume=target.needs_host_volume)
    status = train(target.kubernetes, JOB)
    events = job_logs.events(target.kubernetes, JOB, NAMESPACE)
    show(target.kubernetes, JOB)
    found = report.result(status, events)
    progress.console.print(report.losses(status.phases, "byte"))
    progress.say("\n".join(report.sentences(found)))
    progress.say("\nA sample of what it writes:\n\n" + str(job_logs.named(events, "sample")[-1]["text"]))
    picture = paths.REPOSITORY / "pseudoreal-runs" / "demo" / "loss.png"
    report.draw(events, found.baseline, picture)
    progress.say(f"loss curve: {picture}")


def apply(kubernetes: Kubernetes, *, on_host_volume: bool) -> None:
    """Apply the example from scratch; the remains of an earlier run are deleted first."""
    with progress.step(f"removing what an earlier {JOB} left"):
        kubernetes.run("delete", "-f", str(FILE), f"--namespace={NAMESPACE}", "--ignore-not-found", "--timeout=10m")
        wait_until_gone(kubernetes, JOB)
    with progress.step(f"kubectl apply -f {FILE.relative_to(paths.REPOSITORY)}"):
        if on_host_volume:
            claim = _claim()
            create_host_volume(kubernetes, claim["metadata"]["name"], claim["spec"]["resources"]["requests"]["storage"])
        kubernetes.run("apply", "-f", str(FILE), f"--namespace={NAMESPACE}")


def _claim() -> dict[str, Any]:
    documents = yaml.safe_load_all(FILE.read_text())
    return next(document for document in documents if document["kind"] == "PersistentVolumeClaim")
