"""`make demo`: the whole product on a real Kubernetes, from nothing to a trained model."""

import os
from pathlib import Path

from pseudoreal_dev.demo import chart, job_logs, report
from pseudoreal_dev.demo.example import JOB, NAMESPACE, apply
from pseudoreal_dev.demo.follow import follow
from pseudoreal_dev.demo.target import Target, given, local
from pseudoreal_dev.machine import paths
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_dev.machine.progress import Cost, progress, totals

FOLLOW_SECONDS = 3600.0


def run() -> None:
    """Raises DevError when a part fails; the text says which and what to do."""
    context = os.environ.get("KUBE_CONTEXT")
    target = given(context) if context else local()
    chart.install(target.kubernetes, target.operator_image, target.trainer_image)
    apply(target.kubernetes, on_host_volume=target.needs_host_volume)
    progress.note(f"following {JOB}; Ctrl-C leaves it running")
    try:
        with progress.step(f"training {JOB}", shows_itself=True):
            status = follow(target.kubernetes, JOB, NAMESPACE, FOLLOW_SECONDS)
    except DevError:
        _print(target.kubernetes.run("describe", "prj", JOB, f"--namespace={NAMESPACE}"))
        raise
    events = job_logs.events(target.kubernetes, JOB, NAMESPACE)
    _show(target)
    found = report.result(status, events)
    progress.console.print(report.losses(status.phases))
    _print("\n".join(report.sentences(found)))
    _print("\nA sample of what it writes:\n\n" + str(job_logs.named(events, "sample")[-1]["text"]))
    picture = paths.REPOSITORY / "pseudoreal-runs" / "demo" / "loss.png"
    report.draw(events, found.baseline, picture)
    _finish(target, picture)


def _show(target: Target) -> None:
    for command in (("get", "prj", "-o", "wide"), ("describe", "prj", JOB)):
        _print(f"\n$ kubectl {' '.join(command)}\n{target.kubernetes.run(*command, f'--namespace={NAMESPACE}')}")


def _finish(target: Target, picture: Path) -> None:
    spent = totals(progress.timings)
    once, always = spent[Cost.FIRST_RUN], spent[Cost.EVERY_RUN]
    progress.console.print(progress.table())
    _print(f"time: {once + always:.0f} s, of which {once:.0f} s only a first run pays, and {always:.0f} s every run")
    _print(f"loss curve: {picture}\n\nlook around:\n  " + "\n  ".join(target.hints))


def _print(text: str) -> None:
    progress.console.print(text, markup=False)
