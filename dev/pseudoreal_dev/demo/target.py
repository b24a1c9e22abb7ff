"""Cluster for the demo: the local one, or one of the user."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pseudoreal_api.names import LABEL_JOB

from pseudoreal_dev.cluster import binaries, cluster, preflight
from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.demo.chart import RELEASE
from pseudoreal_dev.images import images
from pseudoreal_dev.machine import packages, paths, shell
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_dev.machine.progress import Cost, progress

NAMESPACE = "default"
"""Namespace of the demos' jobs."""


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


def local() -> Target:
    """Bring up the cluster of this machine with both images. Raises DevError."""
    preflight.require()
    packages.install_missing()
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


def given(context: str) -> Target:
    """Return a target for a cluster of the user. Raises DevError, listing everything missing."""
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
    return Target(
        Kubernetes.of_context(context),
        os.environ["OPERATOR_IMAGE"],
        os.environ["TRAINER_IMAGE"],
        needs_host_volume=False,
        reaching=f"kubectl config use-context {context}",
        ending=f"helm --kube-context={context} uninstall {RELEASE} -n {RELEASE}",
    )
