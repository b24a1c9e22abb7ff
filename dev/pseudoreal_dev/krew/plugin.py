"""Creates `.krew/`: the archive of the plugin, and its manifest for krew.

The archive is reproducible to the byte, so its checksum is known before it is published.
"""

import gzip
import hashlib
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pseudoreal_dev.machine import paths, version

Json = dict[str, Any]

FOLDER = paths.REPOSITORY / ".krew"
ARCHIVE = "kubectl-pseudoreal.tar.gz"
MANIFEST = "pseudoreal.yaml"
_BIN = "kubectl-pseudoreal"
_PACKAGES = (
    *("crds/pseudoreal_api", "operator/pseudoreal_operator"),
    *("operator/pseudoreal", "operator/pseudoreal_client", "trainer/pseudoreal_trainer"),
)
_DESCRIPTION = """\
Shows PseudoRealJobs on a cluster and changes them: get, describe, watch (live, with
the curve of the loss), logs, submit, suspend, resume, finish-phase, repeat-phase. validate names line and column
of mistakes in a job file, and plan says whether the nodes have room for a job.
"""
_CAVEATS = """\
It needs Python 3.11 or newer. The first call installs its packages beside the plugin, from the index that pip uses;
name a Python that has them in PSEUDOREAL_PYTHON to avoid that. The cluster needs the operator of pseudoreal.
"""


def make(url: str, homepage: str) -> Path:
    """Write both files and return their folder. `url` is the future address of the archive, `homepage` the project's
    page."""
    FOLDER.mkdir(exist_ok=True)
    packed = archive()
    (FOLDER / ARCHIVE).write_bytes(packed)
    text = yaml.safe_dump(manifest(url, homepage, packed), sort_keys=False, width=120)
    (FOLDER / MANIFEST).write_text(text)
    return FOLDER


def manifest(url: str, homepage: str, packed: bytes) -> Json:
    """Return the manifest for the archive."""
    systems = {"matchExpressions": [{"key": "os", "operator": "In", "values": ["linux", "darwin"]}]}
    platform = {"selector": systems, "uri": url, "sha256": hashlib.sha256(packed).hexdigest(), "bin": _BIN}
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "pseudoreal"},
        "spec": {
            "version": f"v{version.semantic(version.read())}",
            "homepage": homepage,
            "shortDescription": "Show and change pseudo-to-real training jobs",
            "description": _DESCRIPTION,
            "caveats": _CAVEATS,
            "platforms": [platform],
        },
    }


def archive() -> bytes:
    """Return the compressed archive."""
    packed = io.BytesIO()
    # Without times and names of this machine, so that the archive is reproducible.
    zipped = gzip.GzipFile(fileobj=packed, mode="wb", mtime=0, filename="")
    with zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for name, path in sorted(_files()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = path.stat().st_size, 0o755 if name == _BIN else 0o644
            with path.open("rb") as file:
                tar.addfile(member, file)
    return packed.getvalue()


def _files() -> Iterator[tuple[str, Path]]:
    """Yield the name in the archive and the path of each file."""
    root = paths.REPOSITORY
    yield _BIN, Path(__file__).parent / "kubectl-pseudoreal.sh"
    yield from ((name, root / name) for name in ("LICENSE", "NOTICE"))
    yield "requirements.txt", root / "requirements" / "client.txt"
    for package in _PACKAGES:
        for file in (root / package).rglob("*.py"):
            yield f"lib/{file.relative_to((root / package).parent)}", file
