"""The whole cluster on this machine: up, down, status."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_dev.cluster import network, pause
from pseudoreal_dev.cluster.binaries import PACKAGES, Binaries, build
from pseudoreal_dev.cluster.containerd import Containerd
from pseudoreal_dev.cluster.control_plane import ControlPlane, Site
from pseudoreal_dev.cluster.dns import Dns
from pseudoreal_dev.cluster.network import FIRST
from pseudoreal_dev.cluster.node import Node
from pseudoreal_dev.cluster.second_node import SecondNode
from pseudoreal_dev.machine import cgroups, mounts, paths, processes
from pseudoreal_dev.machine.content_hash import hash_files
from pseudoreal_dev.machine.lock import exclusive
from pseudoreal_dev.machine.processes import Process
from pseudoreal_dev.machine.progress import progress

CONTEXT = "pseudoreal-local"
SITE = Site(
    address=FIRST.address,
    bind="0.0.0.0",
    api_port=6443,
    etcd_port=2379,
    etcd_peer_port=2380,
    prefix=FIRST.inside,
    context=CONTEXT,
    has_nodes=True,
)
# After a change of one of these files, the cluster must be restarted.
SOURCES = (
    *("certificates.py", "cgroups.py", "cluster.py", "containerd.py", "control_plane.py"),
    *("dns.py", "dns.yaml", "network.py", "node.py", "node_files.py", "pause.py"),
)
STRAY_LINKS = ((Path("/var/log/containers"), "*.log"), (Path("/var/lib/cni/results"), "pseudoreal-*"))


@dataclass(frozen=True)
class Cluster:
    """A running cluster, its kubeconfig, and clients of the cluster's version."""

    kubeconfig: Path
    kubectl: Path
    helm: Path
    containerd: Containerd


@dataclass(frozen=True)
class Status:
    """State of the cluster. `processes`: (process, whether it is running). `problem`: the first problem; "" if the
    cluster is healthy."""

    processes: tuple[tuple[Process, bool], ...]
    problem: str


def up(api_server_arguments: Sequence[str] = ()) -> Cluster:
    """Bring the cluster up, or leave a healthy one alone. The remains of a partial start are removed first.

    Raises DevError, with the end of a log, if a part does not come up.
    """
    binaries = build()
    stamp = _stamp(binaries, api_server_arguments)
    with exclusive("cluster"):
        if _problem(stamp):
            _start(binaries, api_server_arguments, stamp)
        else:
            progress.note("the cluster is up already")
    return Cluster(control().kubeconfig, binaries.path("kubectl"), binaries.path("helm"), containerd())


def down() -> None:
    """Stop the cluster and remove its remains, except for its images. Without a cluster, do nothing."""
    with exclusive("cluster"), progress.step("stopping the cluster"):
        _clear()


def status() -> Status:
    """Return the recorded processes and the first problem."""
    stamp = _stamp_file().read_text() if _stamp_file().exists() else ""
    return Status(tuple((process, processes.is_running(process)) for process in _processes()), _problem(stamp))


def containerd() -> Containerd:
    return Containerd(root=paths.cache() / "containerd", run=paths.cluster() / "containerd", host=FIRST)


def control(api_server_arguments: Sequence[str] = ()) -> ControlPlane:
    return ControlPlane(paths.cluster(), site=SITE, api_server_arguments=api_server_arguments)


def _start(binaries: Binaries, api_server_arguments: Sequence[str], stamp: str) -> None:
    with progress.step("starting the cluster"):
        with progress.step("clearing what an earlier run left"):
            _clear()
            mounts.remove([_logs()])
        with progress.step("starting the network and containerd"):
            network.create()
            containerd().start(pause.image(binaries))
            pause.load(containerd(), binaries)
        with progress.step("starting the control plane"):
            control(api_server_arguments).start(binaries)
        with progress.step("starting the node"):
            _dns().start(binaries)
            _node().start(binaries)
        _stamp_file().write_text(stamp)


def _problem(stamp: str) -> str:
    """Return the first problem of the cluster; "" if the cluster is healthy and was started with this stamp."""
    if not _stamp_file().exists():
        return "the cluster is not up"
    if _stamp_file().read_text() != stamp:
        return "the cluster was started from other programs or settings"
    if not FIRST.exists:
        return f"the network namespace {FIRST.namespace} is gone"
    for process in _processes():
        if not processes.is_running(process):
            return f"{process.name} does not run; its log is {process.log}"
    if not (control().server.finds("/readyz") and containerd().answers() and _dns().answers()):
        return "the API server, containerd or CoreDNS does not answer"
    return "" if _node().is_ready() else "the node is not ready"


def _clear() -> None:
    _stamp_file().unlink(missing_ok=True)
    SecondNode(control()).leave()
    _dns().stop()
    _node().stop()
    cgroups.kill()
    if containerd().answers():
        containerd().remove_containers()
    containerd().stop()
    control().stop()
    processes.kill(_strays())
    mounts.unmount_below(paths.cluster())
    cgroups.delete()
    network.delete()
    mounts.remove(path for path in paths.cluster().glob("*") if path != _logs())
    _remove_links()


def _strays() -> list[int]:
    """Return the ids of the cluster's processes without a record. A record is missing if the tooling was killed between
    the start of the process and the write of the record."""
    return [
        pid
        for pid, words in processes.command_lines()
        if words and _is_ours(words[0]) and any(str(paths.cluster()) in word for word in words)
    ]


def _is_ours(program: str) -> bool:
    return Path(program).name in PACKAGES or program.startswith("containerd")


def _remove_links() -> None:
    """Remove the files written by the kubelet and the CNI plugins to fixed places of the machine."""
    for folder, pattern in STRAY_LINKS:
        for path in folder.glob(pattern):
            if not path.is_symlink() or os.readlink(path).startswith(str(paths.cluster())):
                path.unlink()


def _processes() -> list[Process]:
    return [*control().processes, *containerd().processes, *_dns().processes, *_node().processes]


def _node() -> Node:
    return Node(paths.cluster() / "node", FIRST, control(), containerd())


def _dns() -> Dns:
    return Dns(paths.cluster() / "dns", control())


def _stamp(binaries: Binaries, api_server_arguments: Sequence[str]) -> str:
    """Return a hash of the programs' paths, their settings, and the source files for their setup."""
    programs = [str(binaries.path(name)) for name in PACKAGES]
    return hash_files(Path(__file__).parent, SOURCES, [*programs, *api_server_arguments])


def _logs() -> Path:
    return paths.cluster() / "logs"


def _stamp_file() -> Path:
    return paths.cluster() / "stamp"
