"""Digest of the base image in the Dockerfile."""

import re
from pathlib import Path

from pseudoreal_dev.machine import paths, shell
from pseudoreal_dev.machine.errors import DevError

DOCKERFILE = paths.REPOSITORY / "Dockerfile"
_LINE = re.compile(r"^ARG BASE_IMAGE=(?P<image>[^@\s]+)@(?P<digest>sha256:[0-9a-f]{64})$", re.MULTILINE)


def write(image: str | None = None, dockerfile: Path = DOCKERFILE, *, options: tuple[str, ...] = ()) -> str:
    """Write the base image with its current digest into the Dockerfile, and return it as NAME:TAG@DIGEST.

    Asks the registry of `image`, by default the Dockerfile's image, for the digest of its tag. `options` are for
    skopeo. Raises DevError, and CommandFailed with the registry's answer.
    """
    text = dockerfile.read_text()
    name = image or pinned(text)[0]
    if "@" in name or ":" not in name.rpartition("/")[2]:
        raise DevError(f"BASE is {name}, which has no tag of which the digest could be asked; write it as NAME:TAG")
    # For a multi-platform image, this is the digest of the manifest list.
    digest = shell.output(["skopeo", "inspect", *options, "--format", "{{.Digest}}", f"docker://{name}"]).strip()
    found = f"ARG BASE_IMAGE={name}@{digest}"
    if _LINE.fullmatch(found) is None:
        raise DevError(
            f"skopeo says that the digest of {name} is {digest!r}, which is none; look what its registry has"
        )
    dockerfile.write_text(_LINE.sub(found, text))
    return f"{name}@{digest}"


def pinned(text: str) -> tuple[str, str]:
    """Return the base image of a Dockerfile, and its digest. Raises DevError if the Dockerfile pins no base image."""
    found = _LINE.search(text)
    if found is None:
        raise DevError("the Dockerfile has no line ARG BASE_IMAGE=NAME:TAG@sha256:...; give the base image its digest")
    return found["image"], found["digest"]
