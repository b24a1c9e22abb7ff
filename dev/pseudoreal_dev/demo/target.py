"""Cluster for the demo: one that the user names, one in containers of Docker, or one of this machine's own."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pseudoreal_api.names import LABEL_JOB

from pseudoreal_dev.cluster import binaries, cluster, preflight
from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.demo import in_containers
from pseudoreal_dev.demo.chart import RELEASE
from pseudoreal_dev.demo.tools import TOOLS, Tool
from pseudoreal_dev.images import base_image, images
from pseudoreal_dev.machine import packages, paths, shell
from pseudoreal_dev.machine.errors import DevError, Problem
from pseudoreal_dev.machine.progress import Cost, progress

NAMESPACE = "default"
"""Namespace of the demos' jobs."""
IMAGES = ("OPERATOR_IMAGE", "TRAINER_IMAGE")
ANSWER_SECONDS = 15


@dataclass(frozen=True)
class Target:
    """A running cluster, and images available to it."""

    kubernetes: Kubernetes
    operator_image: str
    trainer_image: str
    needs_host_volume: bool
    """Whether volumes must be created by hand, because the cluster has no provisioner."""
    reaching: str
    """Shell commands for reaching the cluster with the user's own kubectl."""
    ending: str
    """Shell command for stopping the local cluster, or for removing the installation from the user's cluster."""

    def hints(self, job: str) -> tuple[str, ...]:
        """Return shell commands to try next."""
        return (
            self.reaching,
            f"kubectl get prj,jobs,pods; kubectl logs -l {LABEL_JOB}={job}",
            "kubectl explain prj.spec.phases",
            self.ending,
        )


def choose() -> Target:
    """Bring up the first cluster that can be had, and say which one and why. Raises DevError, with what each lacks, if
    none can."""
    if context := os.environ.get("KUBE_CONTEXT"):
        return _named(context)
    if _own_is_up():
        progress.say("The demo runs on the cluster of its own on this machine, which is up.")
        return local()
    tool, in_docker = in_containers.find_tool(), in_containers.problems()
    if tool and not in_docker:
        progress.say(f"The demo runs on {tool.program}: it, kubectl and helm are on the PATH, and Docker answers.")
        progress.say(f"Its cluster {in_containers.CLUSTER} stays until `{tool.deletion(in_containers.CLUSTER)}`.")
        return _in_containers(tool)
    if own := [*preflight.problems(preflight.look()), *base_image.problems()]:
        raise DevError(_lacks(in_docker, own))
    reasons = "; ".join(problem.missing for problem in in_docker)
    progress.say(f"The demo runs on a cluster of its own on this machine, because {reasons}.")
    return _bring_up_own()


def local() -> Target:
    """Bring up the cluster of this machine with both images. Raises DevError."""
    preflight.require(base_image.problems())
    return _bring_up_own()


def _own_is_up() -> bool:
    return os.geteuid() == 0 and not cluster.status().problem


def _lacks(in_docker: Sequence[Problem], own: Sequence[Problem]) -> str:
    """Return what the demo could run on, each with its problems."""
    alternatives = {
        "kind, minikube or k3d, in Docker": in_docker,
        "a cluster of its own on this machine": own,
        "a cluster of yours": [Problem("KUBE_CONTEXT is not set", "Set it to a context of kubectl: docs/demo.md")],
    }
    lines = ["The demo needs one of these, and each lacks something:"]
    for name, problems in alternatives.items():
        lines += [f"- {name}", *(f"    {problem}" for problem in problems)]
    return "\n".join([*lines, "Without Kubernetes, `make run` trains a model in local processes."])


def _bring_up_own() -> Target:
    packages.install_missing()
    # Before the compilation, which takes many minutes: this is the other step that depends on the machine.
    images.build_base()
    with _images_in_background():
        binaries.build()
    built = [images.build(target) for target in images.Target]
    running = cluster.up()
    for image in built:
        images.load(image, running.containerd)
        images.drop_older(image, running.containerd)
    kubernetes = Kubernetes.of_kubeconfig(running.kubeconfig, running.kubectl, running.helm)
    operator, trainer = (image.name for image in built)
    return Target(
        kubernetes,
        operator,
        trainer,
        needs_host_volume=True,
        reaching=f"export KUBECONFIG={running.kubeconfig}; export PATH={running.kubectl.parent}:$PATH",
        ending="make cluster-down    stops the cluster; images and programs stay in the cache",
    )


@contextmanager
def _images_in_background() -> Iterator[None]:
    """Build the images in a subprocess during the context. The build of the images waits mostly for network and disk,
    the compilation in the context for the CPU."""
    if binaries.are_cached():
        yield
        return
    log = paths.logs() / "images.log"
    with shell.open_log(log) as out:
        command = [sys.executable, "-m", "pseudoreal_dev", "images", "--export"]
        builder = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        yield
        with progress.step("building the images", cost=Cost.FIRST_RUN, log=log):
            # If this build fails, the next step repeats it and reports the error.
            builder.wait()
    finally:
        builder.terminate()
        builder.wait()


def _in_containers(tool: Tool) -> Target:
    """Bring up the demo's own cluster in containers, with both images."""
    kubernetes = in_containers.start(tool)
    operator, trainer = in_containers.provide_images(tool, in_containers.CLUSTER, kubernetes)
    return Target(
        kubernetes,
        operator.name,
        trainer.name,
        needs_host_volume=False,
        reaching=f"export KUBECONFIG={in_containers.kubeconfig(tool)}",
        ending=f"{tool.deletion(in_containers.CLUSTER)}    deletes the cluster; the images stay in Docker",
    )


def _named(context: str) -> Target:
    """Return a target for the cluster of a context of kubectl, with the images that are named; without them, and on
    kind, minikube and k3d, build them. Raises DevError, listing everything missing."""
    named = {name: os.environ.get(name, "") for name in IMAGES}
    tool, name = (None, "") if any(named.values()) else _tool_of(context)
    missing = in_containers.client_problems()
    missing += _loading_problems(tool) if tool else _image_problems(named)
    if missing:
        raise DevError("\n".join([f"The demo cannot use the context {context} yet:", *(f"- {one}" for one in missing)]))
    kubernetes = Kubernetes.of_context(context)
    try:
        kubernetes.require_answer(ANSWER_SECONDS)
    except shell.CommandFailed as error:
        raise DevError(f"The cluster of KUBE_CONTEXT={context} does not answer.\n{error}") from error
    if tool:
        progress.say(f"The demo runs on {context}, which KUBE_CONTEXT names. {tool.program} loads images built here.")
        operator, trainer = (image.name for image in in_containers.provide_images(tool, name, kubernetes))
    else:
        progress.say(f"The demo runs on {context}, which KUBE_CONTEXT names, with the images that are named.")
        operator, trainer = named.values()
    return Target(
        kubernetes,
        operator,
        trainer,
        needs_host_volume=False,
        reaching=f"kubectl config use-context {context}",
        ending=f"helm --kube-context={context} uninstall {RELEASE} -n {RELEASE}",
    )


def _tool_of(context: str) -> tuple[Tool | None, str]:
    """Return the program that runs the cluster of a context, and the cluster's name in it."""
    for tool in TOOLS:
        if name := tool.cluster_of(context):
            return tool, name
    return None, ""


def _loading_problems(tool: Tool) -> Sequence[Problem]:
    return [*in_containers.tool_problems(tool), *in_containers.docker_problems()]


def _image_problems(named: dict[str, str]) -> list[Problem]:
    found = []
    for name, image in named.items():
        if not image:
            build = "Build the image from the Dockerfile, push it where the cluster can pull it, and set"
            found.append(Problem(f"{name} is not set", f"{build} {name}=registry/name:tag"))
        elif ":" not in image.rpartition("/")[2]:
            found.append(Problem(f"{name} is {image}, without a tag", f"Set {name}=registry/name:tag"))
    return found
