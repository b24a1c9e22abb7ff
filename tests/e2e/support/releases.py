"""The previous release, built from the history of this clone."""

import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_dev.cluster import cluster
from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.demo import chart
from pseudoreal_dev.images import images
from pseudoreal_dev.machine import paths

PREVIOUS = "887889d"
"""First commit with checkpoints of format version 5: jobs of an older one cannot go on after an upgrade."""


@dataclass(frozen=True)
class Release:
    folder: Path
    operator: str
    trainer: str

    def install(self, kubernetes: Kubernetes) -> None:
        chart.install(kubernetes, self.operator, self.trainer, self.folder / "charts" / "pseudoreal")


def previous_release(folder: Path) -> Release | None:
    """Return the release's chart, with its images loaded into the cluster; None if the history of the clone is too
    short."""
    archive = folder / "previous.tar"
    command = ["git", "-C", str(paths.REPOSITORY), "archive", f"--output={archive}", PREVIOUS]
    if subprocess.run(command, capture_output=True).returncode != 0:
        return None
    with tarfile.open(archive) as content:
        content.extractall(folder, filter="data")
    built = [images.build(target, folder) for target in images.Target]
    for image in built:
        images.load(image, cluster.containerd())
    operator, trainer = (image.name for image in built)
    return Release(folder, operator, trainer)
