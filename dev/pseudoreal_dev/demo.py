"""`make demo`: the whole product on a real Kubernetes, from nothing to a trained model."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pseudoreal_api.base import KIND

from . import cluster, images, job_logs, packages, paths, preflight, report
from .errors import DevError
from .follow import follow
from .kubectl import Kubernetes
from .progress import Cost, progress, totals

EXAMPLE = paths.REPOSITORY / "examples" / "quickstart.yaml"
CHART = paths.REPOSITORY / "charts" / "pseudoreal"
RELEASE = SYSTEM_NAMESPACE = "pseudoreal"
NAMESPACE = "default"
FOLLOW_SECONDS = 900.0


@dataclass(frozen=True)
class Target:
    """A cluster that is up, and images that it can run."""

    kubernetes: Kubernetes
    operator_image: str
    trainer_image: str
    prepare_volume: Callable[[], None]
    hints: tuple[str, ...]


def run() -> None:
    """Raises DevError when a part fails; the text says which and what to do."""
    context = os.environ.get("KUBE_CONTEXT")
    target = _given(context) if context else _local()
    install(target)
    job = _job_name(EXAMPLE)
    _apply(target, job)
    progress.note(f"following {job}; Ctrl-C leaves it running")
    try:
        with progress.step(f"training {job}"):
            status = follow(target.kubernetes, job, NAMESPACE, FOLLOW_SECONDS)
    except DevError:
        _print(target.kubernetes.run("describe", "prj", job, f"--namespace={NAMESPACE}"))
        raise
    events = job_logs.events(target.kubernetes, job, NAMESPACE)
    _show(target, job)
    found = report.result(status, events)
    progress.console.print(report.losses(status.phases))
    _print("\n".join(report.sentences(found)))
    _print("\nA sample of what it writes:\n\n" + str(job_logs.named(events, "sample")[-1]["text"]))
    picture = paths.REPOSITORY / "pseudoreal-runs" / "demo" / "loss.png"
    report.draw(events, found.baseline, picture)
    _finish(target, picture)


def install(target: Target) -> None:
    """Installs or upgrades the chart and waits until the operator is ready."""
    values = []
    for part, image in (("operator", target.operator_image), ("trainer", target.trainer_image)):
        repository, _, tag = image.rpartition(":")
        values += [f"--set={part}.image.repository={repository}", f"--set-string={part}.image.tag={tag}"]
    with progress.step("helm install"):
        namespace = [f"--namespace={SYSTEM_NAMESPACE}", "--create-namespace"]
        target.kubernetes.run_helm(
            "upgrade", "--install", RELEASE, str(CHART), *namespace, "--wait", "--timeout=3m", *values
        )


def _local() -> Target:
    preflight.require()
    packages.install_missing()
    built = [images.build(target) for target in images.Target]
    running = cluster.up()
    for image in built:
        images.load(image, running.containerd)
    kubernetes = Kubernetes.of_kubeconfig(running.kubeconfig, running.kubectl, running.helm)
    hints = (
        f"export KUBECONFIG={running.kubeconfig}; export PATH={running.kubectl.parent}:$PATH",
        "kubectl get prj,jobs,pods; kubectl logs -l pseudoreal.dev/job-name=quickstart",
        "kubectl explain prj.spec.phases",
        "make cluster-down    stops the cluster; images and programs stay in the cache",
    )
    operator, trainer = (image.name for image in built)
    return Target(kubernetes, operator, trainer, lambda: _host_volume(kubernetes), hints)


def _given(context: str) -> Target:
    """A cluster that the user has. Raises DevError for what is missing."""
    missing = [
        f"- {program} is not on the PATH; install it" for program in ("kubectl", "helm") if not shutil.which(program)
    ]
    missing += [
        f"- {name} is not set; build the image from the Dockerfile, push it where the cluster can pull it, and set"
        f" {name}=registry/name:tag"
        for name in ("OPERATOR_IMAGE", "TRAINER_IMAGE")
        if not os.environ.get(name)
    ]
    if missing:
        raise DevError("\n".join([f"The demo cannot use the context {context} yet:", *missing]))
    hints = (f"kubectl --context={context} get prj", f"helm --kube-context={context} uninstall {RELEASE} -n {RELEASE}")
    return Target(
        Kubernetes.of_context(context), os.environ["OPERATOR_IMAGE"], os.environ["TRAINER_IMAGE"], lambda: None, hints
    )


def _host_volume(kubernetes: Kubernetes) -> None:
    """A folder of this machine for the example's claim: the local cluster has no provisioner of volumes."""
    claim = next(d for d in _documents(EXAMPLE) if d["kind"] == "PersistentVolumeClaim")
    name = str(claim["metadata"]["name"])
    folder = paths.cache() / "volumes" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    kubernetes.run("delete", "persistentvolume", name, "--ignore-not-found")
    spec = {
        "accessModes": claim["spec"]["accessModes"],
        "capacity": claim["spec"]["resources"]["requests"],
        "hostPath": {"path": str(folder), "type": "Directory"},
        "claimRef": {"namespace": NAMESPACE, "name": name},
        "persistentVolumeReclaimPolicy": "Retain",
    }
    kubernetes.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec})


def _apply(target: Target, job: str) -> None:
    with progress.step(f"removing what an earlier {job} left"):
        target.kubernetes.run(
            "delete", "-f", str(EXAMPLE), f"--namespace={NAMESPACE}", "--ignore-not-found", "--timeout=120s"
        )
        target.kubernetes.run(
            "wait",
            "--for=delete",
            "pods",
            f"--selector=pseudoreal.dev/job-name={job}",
            f"--namespace={NAMESPACE}",
            "--timeout=120s",
        )
    with progress.step(f"kubectl apply -f {EXAMPLE.relative_to(paths.REPOSITORY)}"):
        target.prepare_volume()
        target.kubernetes.run("apply", "-f", str(EXAMPLE), f"--namespace={NAMESPACE}")


def _show(target: Target, job: str) -> None:
    for command in (("get", "prj", "-o", "wide"), ("describe", "prj", job)):
        _print(f"\n$ kubectl {' '.join(command)}\n{target.kubernetes.run(*command, f'--namespace={NAMESPACE}')}")


def _finish(target: Target, picture: Path) -> None:
    spent = totals(progress.timings)
    once, always = spent[Cost.FIRST_RUN], spent[Cost.EVERY_RUN]
    progress.console.print(progress.table())
    _print(f"time: {once + always:.0f} s, of which {once:.0f} s only a first run pays, and {always:.0f} s every run")
    _print(f"loss curve: {picture}\n\nlook around:\n  " + "\n  ".join(target.hints))


def _documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def _job_name(path: Path) -> str:
    job = next(document for document in _documents(path) if document["kind"] == KIND)
    return str(job["metadata"]["name"])


def _print(text: str) -> None:
    progress.console.print(text, markup=False)
