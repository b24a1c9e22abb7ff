"""Base of the other images: a minimal Debian or Ubuntu with Python, from the machine's own archive of packages, or,
where there is Docker, the image that the Dockerfile names."""

import hashlib
import os
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path

from pseudoreal_dev.images import buildah, mirror, pin
from pseudoreal_dev.images.mirror import Mirror
from pseudoreal_dev.machine import docker, paths, shell
from pseudoreal_dev.machine.errors import Missing, Problem
from pseudoreal_dev.machine.progress import Cost, progress

PACKAGES = ("python3", "python3-venv", "ca-certificates")
REPOSITORY = "localhost/pseudoreal-base"
SCRIPTS = Path("/usr/share/debootstrap/scripts")
# Scripts that fit the later suites as well: most of the others are links to them.
NEWEST_SCRIPT = {"Debian": "sid", "Ubuntu": "gutsy"}


def build() -> str:
    """Return the name of the base image, after building or fetching it if needed. Raises DevError."""
    if built := find_built(buildah.images()):
        return built
    try:
        source = mirror.find()
    except Missing as no_mirror:
        _require_docker(no_mirror)
        return _fetch()
    name = f"{REPOSITORY}:{source.suite}-{_recipe()}"
    log = paths.logs() / "base-image.log"
    with progress.step(f"building the base image ({source.origin} {source.suite})", cost=Cost.FIRST_RUN, log=log):
        _build(name, source, log)
    return name


def problems() -> list[Problem]:
    """Return why `build` would fail on this machine, as far as that can be said beforehand."""
    if platform.system() != "Linux":
        return []
    if os.geteuid() == 0:
        if shutil.which("buildah") and find_built(buildah.images()):
            return []
    # Only root can read buildah's storage and fetch apt's lists, and preflight says that root is needed.
    elif shutil.which("apt-get") and not mirror.has_lists():
        return []
    try:
        mirror.find()
    except Missing as no_mirror:
        try:
            _require_docker(no_mirror)
        except Missing as error:
            return [error.problem]
    return []


def _require_docker(no_mirror: Missing) -> None:
    """Raise Missing, with both remedies, if Docker cannot replace the mirror."""
    try:
        docker.look()
    except Missing as no_docker:
        remedy = f"{no_mirror.problem.remedy}; or have the base taken from an image: {no_docker}"
        raise Missing(Problem(no_mirror.problem.missing, remedy)) from no_docker


def find_built(images: Sequence[str]) -> str | None:
    """Return the base among the names of `images`, if there is one of today's recipe."""
    recipes = (_recipe(), _pinned_digest())
    return next((name for name in images if name.startswith(f"{REPOSITORY}:") and name.endswith(recipes)), None)


def debootstrap(source: Mirror, root: Path) -> list[str | Path]:
    """Return the command that unpacks the base from `source` into the folder `root`."""
    options = ["--variant=minbase", f"--include={','.join(PACKAGES)}", f"--components={','.join(source.components)}"]
    known = (SCRIPTS / source.suite).exists()
    script = [] if known else [SCRIPTS / NEWEST_SCRIPT[source.origin]]
    return ["debootstrap", *options, source.suite, root, source.uri, *script]


def _build(name: str, source: Mirror, log: Path) -> None:
    container = buildah.output("from", "scratch")
    root = Path(buildah.output("mount", container))
    shell.run(debootstrap(source, root), log)
    for folder in ("var/cache/apt/archives", "var/lib/apt/lists"):
        _empty(root / folder)
    buildah.run("commit", "--quiet", "--rm", container, name, log=log)


def _fetch() -> str:
    """Take the Dockerfile's base from Docker."""
    image, digest = pin.pinned(pin.DOCKERFILE.read_text())
    name, log = f"{REPOSITORY}:docker-{_pinned_digest()}", paths.logs() / "base-image.log"
    archive = paths.images() / "base.tar"
    archive.parent.mkdir(parents=True, exist_ok=True)
    with progress.step(f"fetching the base image ({image})", cost=Cost.FIRST_RUN, log=log):
        shell.run([docker.PROGRAM, "pull", "--quiet", f"{image}@{digest}"], log)
        try:
            docker.save(f"{image}@{digest}", archive, log)
            shell.run(["skopeo", "copy", f"docker-archive:{archive}", buildah.reference(name)], log)
        finally:
            archive.unlink(missing_ok=True)
    return name


def _recipe() -> str:
    return hashlib.sha256(" ".join(PACKAGES).encode()).hexdigest()[:8]


def _pinned_digest() -> str:
    """Return the first digits of the digest of the Dockerfile's base."""
    return pin.pinned(pin.DOCKERFILE.read_text())[1].removeprefix("sha256:")[:12]


def _empty(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            path.unlink()
