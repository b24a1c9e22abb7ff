"""Base of the other images: a minimal Debian with Python, built from the machine's own Debian mirror."""

import hashlib
from pathlib import Path

from pseudoreal_dev.images import buildah
from pseudoreal_dev.machine import paths, shell
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_dev.machine.progress import Cost, progress

SUITE = "bookworm"
PACKAGES = ("python3", "python3-venv", "ca-certificates")
REPOSITORY = "localhost/pseudoreal-base"


def build() -> str:
    """Return the name of the base image, after building it if needed."""
    name = f"{REPOSITORY}:{SUITE}-{hashlib.sha256(' '.join(PACKAGES).encode()).hexdigest()[:8]}"
    if name not in buildah.images():
        log = paths.logs() / "base-image.log"
        with progress.step(f"building the base image (Debian {SUITE})", cost=Cost.FIRST_RUN, log=log):
            _build(name, log)
    return name


def find_mirror(index_targets: str) -> str:
    """Return the Debian mirror from lines of `ORIGIN SUITE-or-codename URI`. Raises DevError if there is none."""
    for line in index_targets.splitlines():
        origin, _, uri = line.split(maxsplit=2)
        if origin == "Debian" and "security" not in uri:
            return uri
    raise DevError(f"apt knows no Debian mirror for the base image. Add one for {SUITE} to /etc/apt/sources.list.d")


def _build(name: str, log: Path) -> None:
    container = buildah.output("from", "scratch")
    root = Path(buildah.output("mount", container))
    include = f"--include={','.join(PACKAGES)}"
    shell.run(["debootstrap", "--variant=minbase", include, SUITE, root, _mirror()], log)
    for folder in ("var/cache/apt/archives", "var/lib/apt/lists"):
        _empty(root / folder)
    buildah.run("commit", "--quiet", "--rm", container, name, log=log)


def _mirror() -> str:
    form = "$(ORIGIN) $(CODENAME) $(REPO_URI)"
    return find_mirror(shell.output(["apt-get", "indextargets", "--format", form, "Created-By: Packages"]))


def _empty(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            path.unlink()
