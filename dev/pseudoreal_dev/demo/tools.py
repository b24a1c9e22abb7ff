"""Programs that run Kubernetes in containers of Docker: kind, minikube and k3d.

Each function is a command of the program. Those that create a cluster write its kubeconfig into a file of ours, so the
user's own, and with it the context that kubectl uses, stays as it is.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pseudoreal_dev.machine import shell
from pseudoreal_dev.machine.errors import DevError

START_MINUTES = 10


class Tool(Protocol):
    """A program that runs clusters in containers."""

    @property
    def program(self) -> str: ...

    def cluster_of(self, context: str) -> str | None:
        """Return the cluster with this context of kubectl; None if the context is none of this program's."""

    def clusters(self) -> list[str]:
        """Return the names of the clusters that exist, running or not."""

    def create(self, cluster: str, kubeconfig: Path, log: Path) -> None: ...

    def resume(self, cluster: str, kubeconfig: Path, log: Path) -> None:
        """Start an existing cluster, where the program can do that, and write its kubeconfig."""

    def load(self, archive: Path, image: str, cluster: str, log: Path) -> None:
        """Load the image in the archive, made by `docker save`, into all nodes. Raises DevError if it is not there
        afterwards."""

    def deletion(self, cluster: str) -> str:
        """Return the shell command that deletes the cluster."""


@dataclass(frozen=True)
class Kind:
    program: str = "kind"

    def cluster_of(self, context: str) -> str | None:
        return _behind("kind-", context)

    def clusters(self) -> list[str]:
        return shell.output(["kind", "get", "clusters"]).split()

    def create(self, cluster: str, kubeconfig: Path, log: Path) -> None:
        wait = f"--wait={START_MINUTES}m"
        shell.run(["kind", "create", "cluster", f"--name={cluster}", f"--kubeconfig={kubeconfig}", wait], log)

    def resume(self, cluster: str, kubeconfig: Path, log: Path) -> None:
        shell.run(["kind", "export", "kubeconfig", f"--name={cluster}", f"--kubeconfig={kubeconfig}"], log)

    def load(self, archive: Path, image: str, cluster: str, log: Path) -> None:  # noqa: ARG002
        shell.run(["kind", "load", "image-archive", archive, f"--name={cluster}"], log)

    def deletion(self, cluster: str) -> str:
        return f"kind delete cluster --name={cluster}"


@dataclass(frozen=True)
class Minikube:
    program: str = "minikube"

    def cluster_of(self, context: str) -> str | None:
        return context if context == "minikube" or context in self.clusters() else None

    def clusters(self) -> list[str]:
        try:
            listed = json.loads(shell.output(["minikube", "profile", "list", "--output=json"]))
        except (OSError, shell.CommandFailed, ValueError):
            return []  # minikube is not installed, or has never made a cluster
        return [profile["Name"] for kind in ("valid", "invalid") for profile in listed.get(kind) or ()]

    def create(self, cluster: str, kubeconfig: Path, log: Path) -> None:
        options = [f"--profile={cluster}", "--driver=docker", "--interactive=false"]
        shell.run(["minikube", "start", *options], log, environment={"KUBECONFIG": str(kubeconfig)})

    def resume(self, cluster: str, kubeconfig: Path, log: Path) -> None:
        self.create(cluster, kubeconfig, log)

    def load(self, archive: Path, image: str, cluster: str, log: Path) -> None:
        shell.run(["minikube", "image", "load", str(archive), f"--profile={cluster}"], log)
        # Where the node refuses the image, minikube ends with exit code 0 and says nothing.
        if image not in shell.output(["minikube", "image", "ls", f"--profile={cluster}"]).split():
            raise DevError(
                f"minikube did not load {image}, and does not say why. Look for room: `minikube ssh --profile={cluster}"
                " -- df -h /var`"
            )

    def deletion(self, cluster: str) -> str:
        return f"minikube delete --profile={cluster}"


@dataclass(frozen=True)
class K3d:
    program: str = "k3d"

    def cluster_of(self, context: str) -> str | None:
        return _behind("k3d-", context)

    def clusters(self) -> list[str]:
        return [line.split()[0] for line in shell.output(["k3d", "cluster", "list", "--no-headers"]).splitlines()]

    def create(self, cluster: str, kubeconfig: Path, log: Path) -> None:
        options = ["--kubeconfig-update-default=false", f"--timeout={START_MINUTES}m"]
        shell.run(["k3d", "cluster", "create", cluster, *options], log)
        self._write_kubeconfig(cluster, kubeconfig)

    def resume(self, cluster: str, kubeconfig: Path, log: Path) -> None:
        shell.run(["k3d", "cluster", "start", cluster, f"--timeout={START_MINUTES}m"], log)
        self._write_kubeconfig(cluster, kubeconfig)

    def load(self, archive: Path, image: str, cluster: str, log: Path) -> None:
        before = log.stat().st_size if log.exists() else 0
        shell.run(["k3d", "image", "import", archive, f"--cluster={cluster}"], log)
        # Where a node refuses the image, k3d says so and ends with exit code 0.
        with log.open(errors="replace") as said:
            said.seek(before)
            if refusals := [line.strip() for line in said if "failed to" in line]:
                raise DevError(f"k3d did not load {image}: {refusals[0]}")

    def deletion(self, cluster: str) -> str:
        return f"k3d cluster delete {cluster}"

    def _write_kubeconfig(self, cluster: str, kubeconfig: Path) -> None:
        text = shell.output(["k3d", "kubeconfig", "get", cluster])
        kubeconfig.touch(mode=0o600)
        kubeconfig.write_text(text)


TOOLS: tuple[Tool, ...] = (Kind(), Minikube(), K3d())


def _behind(prefix: str, context: str) -> str | None:
    return context.removeprefix(prefix) if context.startswith(prefix) else None
