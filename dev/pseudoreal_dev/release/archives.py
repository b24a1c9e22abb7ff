"""Archives whose bytes depend on their contents alone, and OCI image layouts."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_INDEX = "application/vnd.oci.image.index.v1+json"
_REFERENCE = "org.opencontainers.image.ref.name"


@dataclass(frozen=True)
class Blob:
    """A content of an OCI layout, and its media type."""

    media_type: str
    content: bytes

    @property
    def digest(self) -> str:
        return f"sha256:{hashlib.sha256(self.content).hexdigest()}"

    @property
    def descriptor(self) -> Json:
        return {"mediaType": self.media_type, "digest": self.digest, "size": len(self.content)}


def tar_folder(folder: Path, archive: Path, time: int) -> None:
    """Write all files of a folder into a tar archive, sorted, with one modification time in seconds and no owner."""
    with tarfile.open(archive, "w", format=tarfile.USTAR_FORMAT) as tar:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                entry = _entry(path.relative_to(folder).as_posix(), path.stat().st_size, time)
                with path.open("rb") as content:
                    tar.addfile(entry, content)


def repack(archive: bytes, time: int) -> bytes:
    """Return a gzipped tar archive with the same files in the same order, and nothing of when and by whom it was
    made."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as old,
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0, filename="") as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.USTAR_FORMAT) as new,
    ):
        for member in old:
            content = old.extractfile(member)
            assert content is not None, f"{member.name} is a file, as all that `helm package` packs"
            new.addfile(_entry(member.name, member.size, time), content)
    return packed.getvalue()


def write_layout(folder: Path, config: Blob, layers: Sequence[Blob], annotations: Mapping[str, str], tag: str) -> str:
    """Write an OCI image layout with one manifest, and return the manifest's digest."""
    content = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": config.descriptor,
        "layers": [layer.descriptor for layer in layers],
        "annotations": dict(sorted(annotations.items())),
    }
    manifest = Blob(_MANIFEST, _canonical(content))
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    for blob in (config, *layers, manifest):
        (blobs / blob.digest.removeprefix("sha256:")).write_bytes(blob.content)
    listed = {**manifest.descriptor, "annotations": {_REFERENCE: tag}}
    (folder / "index.json").write_bytes(_canonical({"schemaVersion": 2, "mediaType": _INDEX, "manifests": [listed]}))
    (folder / "oci-layout").write_bytes(_canonical({"imageLayoutVersion": "1.0.0"}))
    return manifest.digest


def _entry(name: str, size: int, time: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = size, time, 0o644
    return entry


def _canonical(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
