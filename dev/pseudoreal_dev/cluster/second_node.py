"""Second node of the cluster, for the duration of a test. The node has its own kubelet, containerd, network and cgroup,
and the images of the first node."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_dev.cluster import network, pause
from pseudoreal_dev.cluster.binaries import Binaries
from pseudoreal_dev.cluster.containerd import Containerd
from pseudoreal_dev.cluster.control_plane import ControlPlane
from pseudoreal_dev.cluster.node import Node
from pseudoreal_dev.machine import cgroups, mounts, paths, shell
from pseudoreal_dev.machine.progress import progress

DATABASES = ("io.containerd.metadata.v1.bolt/meta.db", "io.containerd.snapshotter.v1.overlayfs/metadata.db")


@dataclass(frozen=True)
class SecondNode:
    control: ControlPlane

    def join(self, binaries: Binaries, first: Containerd) -> None:
        """Bring the node up with the images of `first`. Raises DevError if the node does not become ready."""
        with progress.step("starting a second node"):
            self.leave()
            network.create_second()
            _copy_images(first, self.containerd.root)
            self.containerd.start(pause.image(binaries))
            self.node.start(binaries)

    def leave(self) -> None:
        """Stop the node's programs and pods, and remove the node's files and network, as far as they exist."""
        self.node.stop()
        cgroups.kill(cgroups.SECOND)
        if self.containerd.answers():
            self.containerd.remove_containers()
        self.containerd.stop()
        cgroups.delete(cgroups.SECOND)
        for folder in (self.node.directory, self.containerd.run):
            mounts.unmount_below(folder)
            shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(self.containerd.root, ignore_errors=True)
        network.delete_second()

    @property
    def node(self) -> Node:
        return Node(paths.cluster() / "second", network.SECOND, self.control, self.containerd, cgroups.SECOND)

    @property
    def containerd(self) -> Containerd:
        return Containerd(paths.cache() / "second-containerd", paths.cluster() / "second-containerd", network.SECOND)


def _copy_images(source: Containerd, target: Path) -> None:
    """Copy the images of `source` to `target`, while containerd is paused. Content is hard-linked, because containerd
    never changes content; only the databases are copied."""
    shutil.rmtree(target, ignore_errors=True)
    source.pause()
    try:
        shell.output(["cp", "--archive", "--link", source.root, target])
        for name in DATABASES:
            (target / name).unlink()
            shutil.copy2(source.root / name, target / name)
    finally:
        source.resume()
