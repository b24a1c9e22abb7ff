"""Cache of the heads of all committed checkpoints in a folder; each head is read once.

A committed manifest changes only in `CheckpointStore.restate`, which calls `put`. On a file system, the version of a
manifest shows whether another process has replaced it. A save therefore costs as much with 200 checkpoints as with one,
except for listing their folders.
"""

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from pydantic import ValidationError

from pseudoreal_trainer.checkpoint.manifest import FORMAT_VERSION, READABLE_VERSIONS, Head, Manifest
from pseudoreal_trainer.checkpoint.manifest_text import head_in, is_end, manifest_in
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.storage.files import FileStorage
from pseudoreal_trainer.storage.objects import read_beginnings
from pseudoreal_trainer.storage.path import ObjectPath, StoragePath
from pseudoreal_trainer.storage.storage import storage_of

MANIFEST = "manifest.json"
_BEGINNING_BYTES, _ENDING_BYTES = 1 << 14, 16
"""Bytes at the start and at the end of a manifest that are read first. A head has 2 to 3 KB; with a measurement of
experts, more than `_BEGINNING_BYTES`."""
NAME = re.compile(r"[a-z][-a-z0-9]*-\d{8,}")
_FOR_EARLIER = "finish the job with the release that wrote it, before 0.3, or begin anew in a new job or work directory"
_FOR_LATER = "use the release that wrote it, or move the checkpoint away to go on from the one before"

log = structlog.get_logger()


_Version = tuple[int, int, int] | None
"""Inode, modification time in nanoseconds and size of a manifest; None in object storage, where the version would cost
one request per checkpoint at every save."""


@dataclass(frozen=True)
class HeadCache:
    folder: StoragePath
    """Folder of all checkpoints."""
    follows_links: bool = True
    """Whether to follow symbolic links; if not, linked checkpoints and manifests are left out."""
    _known: dict[str, tuple[_Version, Head]] = field(default_factory=dict)
    """Name of a checkpoint's folder -> version of the manifest, head."""

    def all(self) -> list[Head]:
        """Return the heads of all committed checkpoints, unordered. A folder with the manifest of another checkpoint,
        for instance a copy put aside by hand, is skipped. Raises TrainingError like `read_manifest`."""
        try:
            listed = self._listed()
        except OSError as error:
            raise unreadable(self.folder, error) from error
        known = {name: known for name, known in self._known.items() if known[0] == listed.get(name, ())}
        self._known.clear()
        self._known.update(known)
        new = sorted(listed.keys() - known.keys())
        for name, head in zip(new, _heads([self.folder / name for name in new]), strict=True):
            if head is not None and head.name == name:
                self._known[name] = (listed[name], head)
            elif head is not None:
                log.warning("manifest_of_another_folder", folder=name, checkpoint=head.name)
        return [head for _, head in self._known.values()]

    def put(self, head: Head) -> None:
        """Record a checkpoint after its commit, or after its manifest was replaced."""
        try:
            self._known[head.name] = (_version(self.folder / head.name / MANIFEST), head)
        except OSError:
            self.drop(head.name)  # the commit itself succeeded; the head is read when it is needed

    def drop(self, name: str) -> None:
        """Record that a checkpoint is removed."""
        self._known.pop(name, None)

    def __contains__(self, name: str) -> bool:
        """Return True if the checkpoint is known to be committed, without asking the storage."""
        return name in self._known

    def _listed(self) -> dict[str, _Version]:
        """Return folder name -> version of the manifest, for folders with a manifest. In object storage, for all
        folders: only a checkpoint that is being written or removed lacks its manifest."""
        found: Iterable[tuple[str, _Version]]
        if isinstance(self.folder, ObjectPath):
            found = ((folder.name, None) for folder in storage_of(self.folder).folders())
        else:
            paths = FileStorage(self.folder).find(MANIFEST)
            if not self.follows_links:
                paths = [path for path in paths if not (path.is_symlink() or path.parent.is_symlink())]
            found = ((path.parent.name, _version(path)) for path in paths)
        return {name: version for name, version in found if NAME.fullmatch(name)}


def _version(manifest: StoragePath) -> _Version:
    if isinstance(manifest, ObjectPath):
        return None
    try:
        found = manifest.stat()
    except FileNotFoundError:
        return None  # removed since the listing
    return found.st_ino, found.st_mtime_ns, found.st_size


def read_manifest(folder: StoragePath) -> Manifest | None:
    """Return the manifest in a folder. None, with a warning, if the manifest is invalid: the checkpoint counts as not
    committed.

    Raises TrainingError if the manifest cannot be read or has another format version: starting from an older checkpoint
    would discard training.
    """
    try:
        text = storage_of(folder / MANIFEST).read()
    except FileNotFoundError:
        return None  # removed since the listing
    except OSError as error:
        raise unreadable(folder, error) from error
    return parse_manifest(folder, text)


def parse_manifest(folder: StoragePath, text: bytes) -> Manifest | None:
    """Return the manifest of `folder`, parsed from its content. None and TrainingError as in `read_manifest`."""
    try:
        return manifest_in(text)
    except ValidationError as error:
        _refuse_other_version(folder, text)
        log.warning("manifest_unreadable", checkpoint=folder.name, error=str(error).splitlines()[0])
    return None


def unreadable(path: StoragePath, error: OSError) -> TrainingError:
    return TrainingError(f"{path} cannot be read, so nobody knows which checkpoint is the newest: {error}")


def _heads(folders: Sequence[StoragePath]) -> Iterable[Head | None]:
    """Return the heads of the manifests in these folders; None for a manifest that is missing or invalid."""
    beginnings = [_beginning(folder / MANIFEST) for folder in folders if isinstance(folder, Path)]
    # Concurrently: 200 requests in sequence would take as many round trips.
    objects = [folder / MANIFEST for folder in folders if isinstance(folder, ObjectPath)]
    return map(_head, folders, [*beginnings, *read_beginnings(objects, _BEGINNING_BYTES)])


def _head(folder: StoragePath, beginning: bytes | None) -> Head | None:
    if beginning is None:
        return None
    try:
        head = head_in(beginning)
    except ValidationError:
        head = None  # the whole manifest may still be valid
    if head is not None:
        return head
    manifest = read_manifest(folder)
    return None if manifest is None else manifest.head


def _beginning(path: Path) -> bytes | None:
    """Return the first bytes of a manifest; None if the file is missing, empty if the file was truncated."""
    try:
        with path.open("rb", buffering=0) as file:
            ending = os.pread(file.fileno(), _ENDING_BYTES, max(0, os.fstat(file.fileno()).st_size - _ENDING_BYTES))
            return os.pread(file.fileno(), _BEGINNING_BYTES, 0) if is_end(ending) else b""
    except FileNotFoundError:
        return None  # removed since the listing
    except OSError as error:
        raise unreadable(path.parent, error) from error


def _refuse_other_version(folder: StoragePath, text: bytes) -> None:
    try:
        version = json.loads(text)["formatVersion"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return
    if isinstance(version, int) and version not in READABLE_VERSIONS:
        remedy = _FOR_EARLIER if version < FORMAT_VERSION else _FOR_LATER
        readable = " and ".join(map(str, READABLE_VERSIONS))
        raise TrainingError(
            f"{folder / MANIFEST} has format version {version}, and this release reads {readable}; {remedy}"
        )
