"""The project's two images, built by Docker. They are made for CPUs: clusters in containers have no GPU."""

from collections.abc import Mapping
from pathlib import Path

from pseudoreal_dev.images.images import Image, Target, stage
from pseudoreal_dev.machine import docker, paths, shell
from pseudoreal_dev.machine.content_hash import hash_files
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_dev.machine.lock import exclusive
from pseudoreal_dev.machine.progress import Cost, progress

ARGUMENTS: Mapping[Target, tuple[str, ...]] = {Target.OPERATOR: (), Target.TRAINER: ("--build-arg", "TORCH=cpu")}
# buildx adds a second entry, which says how the image was built, and archives of the image lack what it refers to:
# containerd then refuses them. Builders that do not add it ignore this variable.
ENVIRONMENT = {"BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}


def build(target: Target, repository: Path = paths.REPOSITORY) -> Image:
    """Build a target of the Dockerfile, unless Docker has it already. Raises DevError, with the end of the log."""
    with exclusive("images"):
        context = stage(target, repository)
        image = Image(target, hash_files(context, ["*"], [target, *ARGUMENTS[target]]))
        if not docker.has_image(image.name):
            log = paths.logs() / f"image-{target}.log"
            with progress.step(f"building the {target} image with Docker", cost=Cost.FIRST_RUN, log=log):
                _build(image, context, log)
    return image


def _build(image: Image, context: Path, log: Path) -> None:
    options = ["--target", str(image.target), *ARGUMENTS[image.target], "--tag", image.name]
    file = context / "Dockerfile"
    shell.run([docker.PROGRAM, "build", *options, "--file", file, context], log, environment=ENVIRONMENT)
    if not docker.has_image(image.name):
        raise DevError(
            f"docker build ended well, and Docker has no image {image.name}: `docker buildx ls` shows which builder is"
            " chosen. One of the driver `docker` keeps images: `docker buildx use default`"
        )
