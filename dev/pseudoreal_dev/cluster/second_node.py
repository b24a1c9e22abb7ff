"""A second node for the cluster, for as long as a test needs one: with a kubelet, a containerd, a network and a cgroup
of its own, and the images of the first node."""

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
        """Brings the node up with the images that `first` has. Raises DevError if it does not get ready."""
        with progress.step("starting a second node"):
            self.leave()
            network.create_second()
            _copy_images(first, self.containerd.root)
            self.containerd.start(pause.image(binaries))
            self.node.start(binaries)

    def leave(self) -> None:
        """Ends what runs on the node and removes what it left, as far as it is there."""
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
    """All files as further links to the same content, which containerd never changes; its databases are copied while
    nobody writes to them."""
    shutil.rmtree(target, ignore_errors=True)
    source.pause()
    try:
        shell.output(["cp", "--archive", "--link", source.root, target])
        for name in DATABASES:
            (target / name).unlink()
            shutil.copy2(source.root / name, target / name)
    finally:
        source.resume()
