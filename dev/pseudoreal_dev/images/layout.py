"""Transfers images from buildah to containerd, each blob once.

An OCI image layout lies in between. Once containerd has a large blob, the layout keeps only a sparse file of the blob's
length, which uses no space. skopeo finds the file and does not write the blob again.
"""

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pseudoreal_dev.cluster.containerd import Containerd
from pseudoreal_dev.images import buildah
from pseudoreal_dev.machine import paths, shell
from pseudoreal_dev.machine.progress import Cost, progress
from pseudoreal_dev.machine.shell import CommandFailed

HOLLOW_BYTES = 64 * 1024**2
DIGEST_PREFIX = "sha256:"


def load(name: str, containerd: Containerd) -> None:
    """Transfer an image from buildah to containerd. Raises CommandFailed if one of the two refuses."""
    held = set(containerd.names_of("content"))
    _drop_hollow_blobs(held)
    export(name)
    descriptor = find_descriptor(json.loads((_folder() / "index.json").read_text()))
    manifest = json.loads(_blob(descriptor["digest"]).read_text())
    with progress.step(f"importing {name}", cost=Cost.FIRST_RUN):
        _import(name, descriptor, missing_blobs(manifest, held), containerd)
    _empty(set(containerd.names_of("content")))


def export(name: str) -> None:
    """Write the missing blobs of a buildah image into the layout. Raises CommandFailed."""
    log = paths.logs() / "image-load.log"
    with progress.step(f"exporting {name}", cost=Cost.FIRST_RUN, log=log):
        # The digest of a compressed layer is known only after it is written, so buildah's own push would write all
        # layers every time.
        accept = "--dest-oci-accept-uncompressed-layers"
        shell.run(["skopeo", "copy", accept, buildah.reference(name), f"oci:{_folder()}:image"], log)


def find_descriptor(index: Mapping[str, Any]) -> dict[str, Any]:
    """Return the descriptor of the newest exported image from a layout's index."""
    reference = "org.opencontainers.image.ref.name"
    return next(entry for entry in index["manifests"] if entry.get("annotations", {}).get(reference) == "image")


def missing_blobs(manifest: Mapping[str, Any], held: Iterable[str]) -> list[str]:
    """Return the digests of an image's configuration and layers missing from `held`, without duplicates, in order."""
    known = set(held)
    digests = dict.fromkeys(digests_of(manifest))
    return [digest for digest in digests if digest not in known]


def digests_of(manifest: Mapping[str, Any]) -> list[str]:
    """Return the digests of all contents of a manifest."""
    return [piece["digest"] for piece in (manifest["config"], *manifest["layers"])]


def _import(name: str, descriptor: dict[str, Any], blobs: list[str], containerd: Containerd) -> None:
    named = {**descriptor, "annotations": {"io.containerd.image.name": name}}
    index = {"schemaVersion": 2, "manifests": [named]}
    command = containerd.client("images", "import", "-")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as client:
        assert client.stdin
        assert client.stdout
        with client.stdin as pipe, tarfile.open(fileobj=pipe, mode="w|", bufsize=1024**2) as archive:
            _add(archive, "oci-layout", {"imageLayoutVersion": "1.0.0"})
            _add(archive, "index.json", index)
            for digest in (descriptor["digest"], *blobs):
                archive.add(_blob(digest), _blob(digest).relative_to(_folder()).as_posix())
        said = client.stdout.read().decode(errors="replace")
    if client.returncode != 0:
        raise CommandFailed(f"containerd refused {name}: {said}")


def _add(archive: tarfile.TarFile, name: str, value: Mapping[str, Any]) -> None:
    content = json.dumps(value).encode()
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def _drop_hollow_blobs(held: set[str]) -> None:
    """Remove the hollow blobs that containerd lacks, so that skopeo writes them in full."""
    for blob in _blobs():
        if is_hollow(blob) and f"{DIGEST_PREFIX}{blob.name}" not in held:
            blob.unlink()


def _empty(held: set[str]) -> None:
    """Hollow the large blobs present in containerd; delete small blobs, because they are quickly written again."""
    for blob in _blobs():
        if blob.stat().st_size < HOLLOW_BYTES:
            blob.unlink()
        elif not is_hollow(blob) and f"{DIGEST_PREFIX}{blob.name}" in held:
            hollow(blob)
    (_folder() / "index.json").unlink()


def hollow(blob: Path) -> None:
    """Free the content of a file and keep its length. An interruption leaves the file whole or hollow."""
    empty = blob.with_name(f".{blob.name}")
    empty.touch()
    os.truncate(empty, blob.stat().st_size)
    os.replace(empty, blob)


def is_hollow(blob: Path) -> bool:
    """Return whether a large file has a length but no content."""
    facts = blob.stat()
    return facts.st_size >= HOLLOW_BYTES and facts.st_blocks == 0


def _blobs() -> list[Path]:
    return [path for path in (_folder() / "blobs" / "sha256").glob("*") if not path.name.startswith(".")]


def _blob(digest: str) -> Path:
    return _folder() / "blobs" / "sha256" / digest.removeprefix(DIGEST_PREFIX)


def _folder() -> Path:
    return paths.images() / "layout"
