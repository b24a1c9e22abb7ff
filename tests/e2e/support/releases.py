"""The previous release, built from the history of this clone."""

import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from itertools import chain as chained
from pathlib import Path

from pseudoreal_dev.cluster import cluster
from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.demo import chart
from pseudoreal_dev.images import images
from pseudoreal_dev.machine import paths

PREVIOUS, COMMIT = "0.3.0", "f934f6a"
_PROGRAMS = ("crds", "operator", "trainer")


@dataclass(frozen=True)
class Release:
    folder: Path
    operator: str
    trainer: str

    def install(self, kubernetes: Kubernetes) -> None:
        """Install the release as its users did: with its own chart and values."""
        chart.install(kubernetes, self.operator, self.trainer, self.folder / "charts" / "pseudoreal", options=())


def previous_release(folder: Path) -> Release | None:
    """Return the release's chart, with its images loaded into the cluster; None if the history of the clone is too
    short.

    The images have the release's programs and the libraries of this checkout: another torch would take 5 GB of disk.
    """
    archive = folder / "previous.tar"
    command = ["git", "-C", str(paths.REPOSITORY), "archive", f"--output={archive}", COMMIT]
    if subprocess.run(command, capture_output=True).returncode != 0:
        return None
    with tarfile.open(archive) as content:
        content.extractall(folder, filter="data")
    for file in {*chained.from_iterable(images.CONTEXT.values())}:
        if Path(file).parts[0] not in _PROGRAMS:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(paths.REPOSITORY / file, folder / file)
    built = [images.build(target, folder) for target in images.Target]
    for image in built:
        images.load(image, cluster.containerd())
    operator, trainer = (image.name for image in built)
    return Release(folder, operator, trainer)
