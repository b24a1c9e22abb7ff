"""The project's two images: built from the Dockerfile, tagged by their content, loaded into the cluster."""

import shutil
from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pseudoreal_dev.cluster.containerd import Containerd
from pseudoreal_dev.images import base_image, build_settings, buildah, layout
from pseudoreal_dev.machine import paths
from pseudoreal_dev.machine.content_hash import hash_files, list_files
from pseudoreal_dev.machine.lock import exclusive
from pseudoreal_dev.machine.progress import Cost, progress

# A dozen small layers, or a second torch, exceed this limit.
STORAGE_LIMIT_BYTES = 12 * 1024**3


class Target(StrEnum):
    """A target of the Dockerfile."""

    OPERATOR = "operator"
    TRAINER = "trainer"


# A build sees only these files, so no other file can change the image.
COMMON = (
    "Dockerfile",
    ".dockerignore",
    "LICENSE",
    "NOTICE",
    "crds/pseudoreal_api",
    "dev/pseudoreal_dev/images/licences.py",
)
CONTEXT: Mapping[Target, tuple[str, ...]] = {
    Target.OPERATOR: (*COMMON, "requirements/operator.txt", "operator/pseudoreal_operator"),
    Target.TRAINER: (
        *COMMON,
        "requirements/trainer.txt",
        "requirements/trainer-cpu.txt",
        "requirements/uv.txt",
        "trainer/pseudoreal_trainer",
        "examples/corpus.sh",
    ),
}


@dataclass(frozen=True)
class Image:
    """A built image. Its tag is a hash of its sources."""

    target: Target
    tag: str

    @property
    def repository(self) -> str:
        return f"localhost/pseudoreal-{self.target}"

    @property
    def name(self) -> str:
        """Full name, as in a pod's spec."""
        return f"{self.repository}:{self.tag}"


def build_base() -> None:
    """Build the base of both images, unless it is built already. Raises DevError."""
    with exclusive("images"):
        base_image.build()


def build(target: Target, repository: Path = paths.REPOSITORY) -> Image:
    """Build a target of the Dockerfile, unless it is built already. Raises CommandFailed with the end of the log."""
    with exclusive("images"):
        base = base_image.build()
        context = stage(target, repository)
        image = Image(target, hash_files(context, ["*"], [target, base]))
        if image.name not in buildah.images():
            log = paths.logs() / f"image-{target}.log"
            with progress.step(f"building the {target} image", cost=Cost.FIRST_RUN, log=log):
                _build(image, base, context, log)
    return image


def export(image: Image) -> None:
    """Write the image into the OCI layout: the part of `load` that needs no containerd.

    The first export writes gigabytes, so call this function while the cluster is being built.
    """
    with exclusive("images"):
        layout.export(image.name)


def load(image: Image, containerd: Containerd) -> None:
    """Import the parts of the image missing in the cluster's containerd."""
    if image.name in containerd.names_of("images"):
        return
    with exclusive("images"), progress.step(f"loading the {image.target} image", cost=Cost.FIRST_RUN):
        layout.load(image.name, containerd)


def drop_older(image: Image, containerd: Containerd | None) -> None:
    """Remove older images of the same target, from the cluster too; remove all untagged layers if the storage exceeds
    its limit."""
    with exclusive("images"):
        for name in buildah.images():
            if _is_older(name, image):
                buildah.output("rmi", name)
        if _size(buildah.storage()) > STORAGE_LIMIT_BYTES:
            buildah.output("rmi", "--prune", "--force")
        if containerd is not None:
            targets = containerd.image_targets()
            kept = {name for name in targets if "/" in name and not _is_older(name, image)}
            containerd.remove_images(unneeded(targets, kept))


def unneeded(targets: Mapping[str, str], kept: Set[str]) -> list[str]:
    """Return the names in `targets` (name -> digest) to remove: older tags, and digests that belong to no kept image.

    The CRI plugin of containerd gives each image a second name, the digest. This second name would keep the content
    forever.
    """
    digests = {targets[name] for name in kept}
    return [name for name, digest in targets.items() if name not in kept and ("/" in name or digest not in digests)]


def _build(image: Image, base: str, context: Path, log: Path) -> None:
    buildah.clear_leftovers()
    volumes = [word for mount in build_settings.mounts() for word in ("--volume", mount)]
    what = ["--layers", "--target", str(image.target), "--build-arg", f"BASE_IMAGE={base}", "--tag", image.name]
    buildah.run("bud", *what, *volumes, "--file", context / "Dockerfile", context, log=log)


def stage(target: Target, repository: Path) -> Path:
    """Create a folder with the files visible to a build. File times are preserved, so unchanged layers hit the
    cache."""
    context = paths.images() / "context"
    shutil.rmtree(context, ignore_errors=True)
    for file in list_files(repository, CONTEXT[target]):
        copy = context / file.relative_to(repository)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy)
    return context


def _is_older(name: str, newest: Image) -> bool:
    return name.startswith(f"{newest.repository}:") and name != newest.name


def _size(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))
