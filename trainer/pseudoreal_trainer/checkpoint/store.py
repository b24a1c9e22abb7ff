"""The checkpoints of one job: listing, verification, commit, removal.

`<work directory>/checkpoints/<phase>-<step>/{weights-*.safetensors, moments-*.safetensors, manifest.json}`
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TypeVar

import structlog
from pseudoreal_api.resolved.config import DelinkConfig, DiscardConfig, PhaseConfig

from pseudoreal_trainer.checkpoint.heads import MANIFEST, NAME, HeadCache, parse_manifest
from pseudoreal_trainer.checkpoint.manifest import FileDigest, Head, Manifest
from pseudoreal_trainer.checkpoint.manifest_text import manifest_text
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.visibility import await_size, read_when_visible
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.storage.path import StoragePath, storage_path
from pseudoreal_trainer.storage.storage import storage_of

_VERIFIED_AT_ONCE, _ASKED_AT_ONCE = 2, 16
"""Number of files verified at a time, and number of files whose sizes are requested at a time."""

Discards = Mapping[str, Sequence[DiscardConfig]]

_H = TypeVar("_H", bound=Head)

log = structlog.get_logger()


class CorruptCheckpoint(TrainingError):
    """A committed checkpoint with an invalid manifest, or with files that are missing or differ from the manifest."""


@dataclass(frozen=True)
class CheckpointStore:
    """All checkpoints of the job `job_uid` in its work directory. If `job_uid` is None, checkpoints of any job are
    accepted and get execution 0, which is before every execution of this job."""

    work_directory: StoragePath
    job_uid: str | None
    discards: Discards = field(default_factory=dict)
    """Phase -> rules for its discarded checkpoints, which count as removed."""
    forgotten: Discards = field(default_factory=dict)
    """Phase -> discard rules recorded by the job of this work directory, if another job continues it. Checkpoints that
    match a rule are ignored."""

    @property
    def folder(self) -> StoragePath:
        return self.work_directory / "checkpoints"

    @cached_property
    def _heads(self) -> HeadCache:
        return HeadCache(self.folder)

    def heads(self) -> list[Head]:
        """Return all committed checkpoints, unordered: checkpoints of any job, discarded or not."""
        return self._heads.all()

    def committed(self, phase: str | None = None) -> list[Head]:
        """Return the committed checkpoints that are not discarded, oldest first. Raises TrainingError if a checkpoint
        belongs to another job or has another format version."""
        return self._counting(self._all(), phase)

    def _counting(self, heads: Sequence[Head], phase: str | None = None) -> list[Head]:
        ordered = sorted(heads, key=lambda head: (head.phase_index, head.step))
        return [head for head in ordered if phase in (None, head.phase) and not _hits(self.discards, head)]

    def whole(self, head: Head) -> Manifest:
        """Return the manifest with tensors and files. Raises CorruptCheckpoint if the manifest is invalid."""
        if isinstance(head, Manifest):
            return head
        path = self.folder / head.name / MANIFEST
        with _reading(path):
            text = storage_of(path).read()
        return self._whole(head.name, text)

    def _whole(self, name: str, text: bytes) -> Manifest:
        manifest = parse_manifest(self.folder / name, text)
        if manifest is None or manifest.name != name:
            raise CorruptCheckpoint(f"{self.folder / name / MANIFEST} makes no sense as the manifest of {name}")
        return self._own(manifest)

    def newest(self, phase: str, *, complete: bool = False) -> Reader | None:
        """Return the newest intact checkpoint of a phase; with `complete`, the newest checkpoint at an end of the
        phase.

        None if the phase has no such checkpoint. Raises CorruptCheckpoint if the phase has such checkpoints and all are
        corrupt; with `complete`, if the newest one is: a prolonged phase has an older end, of less training.
        """
        candidates = self.candidates(phase, complete=complete)
        for head in candidates:
            try:
                manifest = self.whole(head)
                self.verify(manifest)
                return self.reader(manifest)
            except CorruptCheckpoint as error:
                if complete and len(candidates) > 1:
                    raise CorruptCheckpoint(
                        f"{head.name}, the newest end of phase {phase} in {self.folder}, is corrupt: {error}; restore"
                        f" it, or delete it to go on from {candidates[1].name}, the end before it"
                    ) from error
                log.warning("checkpoint_corrupt", checkpoint=head.name, error=str(error))
        if candidates:
            raise self.all_corrupt(phase, [head.name for head in candidates])
        return None

    def candidates(self, phase: str, *, complete: bool = False) -> list[Head]:
        """Return the committed checkpoints of a phase, newest first, without verifying them."""
        return [m for m in reversed(self.committed(phase)) if m.phase_complete or not complete]

    def all_corrupt(self, phase: str, names: Sequence[str]) -> CorruptCheckpoint:
        """Return the error for a phase without an intact checkpoint. `names`: names of the corrupt checkpoints;
        empty on ranks that do not know the names."""
        which = f": {', '.join(names)}" if names else ""
        return CorruptCheckpoint(
            f"every checkpoint of phase {phase} in {self.folder} is corrupt{which}; restore one, or delete them to"
            " train the phase anew"
        )

    def reader(self, head: Head) -> Reader:
        return Reader(self.whole(head), self.folder)

    def verify(self, head: Head, part: int = 0, parts: int = 1, *, renamed: str | None = None) -> None:
        """Compare the files with their digests; with `parts` > 1, only the files of part `part` of `parts`. `renamed`:
        name of the checkpoint's folder, if it differs from the manifest's.

        Raises CorruptCheckpoint, which names the file.
        """
        manifest = self.whole(head)
        folder = self.folder / (renamed if renamed is not None and manifest.link is None else manifest.data_folder)
        # Hashing takes longer than reading, and releases the GIL.
        with ThreadPoolExecutor(_VERIFIED_AT_ONCE, "verify") as pool:
            for _ in pool.map(lambda file: _verify_file(folder / file[0], file[1]), _part(manifest, part, parts)):
                pass

    def check_sizes(self, manifest: Manifest, part: int = 0, parts: int = 1) -> None:
        """Compare the sizes of the files that `verify` reads with the manifest. Raises CorruptCheckpoint, which names
        the file, if a file is missing or has another size."""
        folder = self.folder / manifest.data_folder
        with ThreadPoolExecutor(_ASKED_AT_ONCE, "sizes") as pool:
            for _ in pool.map(lambda file: _check_size(folder / file[0], file[1]), _part(manifest, part, parts)):
                pass

    def manifest_when_visible(self, name: str, digest: str) -> Manifest:
        """Return the manifest of the checkpoint with this name and digest, chosen by the first rank.

        Raises TrainingError if the manifest does not become visible on this rank in time, CorruptCheckpoint if it is
        invalid.
        """
        return self._whole(name, read_when_visible(self.folder / name / MANIFEST, digest))

    def await_files(self, manifest: Manifest, part: int, parts: int) -> None:
        """Wait until the files of part `part` of `parts` are visible on this rank with their full size. Raises
        TrainingError on a timeout."""
        for name, file in _part(manifest, part, parts):
            await_size(self.folder / manifest.data_folder / name, file.size)

    def begin(self, head: Head) -> StoragePath:
        """Create an empty folder for the checkpoint. An earlier checkpoint of this name is removed, after the
        checkpoints that link to it."""
        folder = self.folder / head.name
        if storage_of(folder / MANIFEST).exists():
            for name in _linked(self._heads.all(), head.name):
                self._remove(name)
        self._remove(head.name)
        storage_of(folder).make_folder()
        return folder

    def commit(self, manifest: Manifest) -> None:
        """Commit a checkpoint by writing its manifest. All its files must have been stored since `begin`."""
        storage_of(self.folder / manifest.name / MANIFEST).complete(manifest_text(manifest))
        self._heads.put(manifest.head)

    def restate(self, manifest: Manifest) -> None:
        """Replace the manifest of a committed checkpoint; its files stay."""
        storage_of(self.folder / manifest.name / MANIFEST).replace(manifest_text(manifest))
        self._heads.put(manifest.head)

    def digest(self, head: Head) -> str:
        """Return the SHA-256 of the manifest. The digest covers all files, because the manifest contains their
        digests."""
        return hashlib.sha256(storage_of(self.folder / head.name / MANIFEST).read()).hexdigest()

    def prune(
        self,
        keep_last: int,
        keep_every: int | None,
        verified: Sequence[str] = (),
        may_remove: Callable[[], None] | None = None,
    ) -> list[str]:
        """Remove discarded checkpoints, with the checkpoints linked to them, and checkpoints outside the retention
        policy.

        Return the names of discarded checkpoints, then the names selected by the policy.

        `verified`: names of checkpoints that are known to be intact. `may_remove` is called before each removal and
        raises if this process may not remove anything any more.
        """
        heads = self._all()
        discarded = [head.name for head in heads if _hits(self.discards, head)]
        # Checkpoints that link to the files of a discarded one are removed before it.
        gone = dict.fromkeys(chain.from_iterable((*_linked(heads, name), name) for name in discarded))
        left = [head for head in heads if head.name not in gone]
        names = [head.name for head in removable(self._counting(left), keep_last, keep_every, verified)]
        for name in [*gone, *names]:
            if may_remove is not None:
                may_remove()
            self._remove(name)
        return discarded + names

    def names(self) -> set[str]:
        """Return the names of all folders that are named like a checkpoint, committed or not."""
        return {folder.name for folder in storage_of(self.folder).folders() if NAME.fullmatch(folder.name)}

    def sweep(self, names: Set[str], may_remove: Callable[[], None] | None = None) -> None:
        """Remove the uncommitted folders among `names`: an execution was killed, or failed, while saving or removing
        them. Folders with other names may belong to a process that is still writing. `may_remove`: as in `prune`."""
        for name in sorted(self.names() & names):
            if name not in self._heads and not storage_of(self.folder / name / MANIFEST).exists():
                log.info("unfinished_checkpoint_removed", checkpoint=name)
                if may_remove is not None:
                    may_remove()
                self._remove(name)

    def _all(self) -> list[Head]:
        """Return the committed checkpoints, discarded ones included, except the `forgotten` ones; in no order."""
        return [self._own(head) for head in self._heads.all() if not _hits(self.forgotten, head)]

    def _remove(self, name: str) -> None:
        self._heads.drop(name)
        remove(self.folder / name)

    def _own(self, manifest: _H) -> _H:
        if self.job_uid is None:
            return manifest.revised(execution=0)
        if manifest.job.uid != self.job_uid:
            raise TrainingError(
                f"checkpoint {manifest.name} in {self.folder} belongs to job {manifest.job.name} with uid"
                f" {manifest.job.uid}, not {self.job_uid}; use another work directory"
            )
        return manifest


def removable(
    committed: Sequence[Head], keep_last: int, keep_every: int | None, verified: Collection[str]
) -> list[Head]:
    """Return the checkpoints to remove from `committed`, which is ordered from oldest to newest.

    Kept are: the first and last checkpoints of phases; of the others, the newest `keep_last` and all at multiples of
    `keep_every` steps; checkpoints in `verified`, which are known to be intact; and checkpoints that a kept one links
    to.
    """
    inner = [head for head in committed if not head.is_boundary]
    kept = {head.name for head in committed if head.is_boundary}
    kept |= {head.name for head in inner[-keep_last:]}
    kept |= {head.name for head in inner if keep_every and head.step % keep_every == 0}
    kept |= {head.name for head in committed if head.name in verified}
    kept |= {head.data_folder for head in committed if head.name in kept}
    return [head for head in committed if head.name not in kept]


def _linked(heads: Sequence[Head], name: str) -> list[str]:
    """Return the names of the checkpoints that link to the files of `name`. They are removed before `name`, so that
    every committed checkpoint always has its files."""
    return [head.name for head in heads if head.link is not None and head.link.folder == name]


def _part(manifest: Manifest, part: int, parts: int) -> list[tuple[str, FileDigest]]:
    """Return the files of part `part` of `parts`, in the order of their names."""
    return sorted(manifest.files.items(), key=lambda file: file[0])[part::parts]


def _verify_file(path: StoragePath, expected: FileDigest) -> None:
    with _reading(path):
        found = storage_of(path).sha256()
    if found != expected.sha256:
        _check_size(path, expected)
        raise CorruptCheckpoint(f"{path} has the SHA-256 {found}; the manifest says {expected.sha256}")


def _check_size(path: StoragePath, expected: FileDigest) -> None:
    with _reading(path):
        size = storage_of(path).size()
    if size != expected.size:
        raise CorruptCheckpoint(f"{path} has {size:,} bytes; the manifest says {expected.size:,}")


@contextmanager
def _reading(path: StoragePath) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptCheckpoint(f"{path} is not there: {error}") from error
    except OSError as error:
        # The file may be intact: starting from an older checkpoint would discard training.
        raise TrainingError(
            f"{path} cannot be read: {error}; if that stays so, move the checkpoint away to go on from the one before"
        ) from error


def _hits(discards: Discards, head: Head) -> bool:
    rules = discards.get(head.phase, ())
    return any(head.execution < rule.before_execution and head.step >= rule.from_step for rule in rules)


def store_of(config: PhaseConfig | DelinkConfig) -> CheckpointStore:
    return CheckpointStore(storage_path(config.storage), config.job.uid, config.discards or {})


def remove(folder: StoragePath) -> None:
    """Remove a checkpoint. If the folder is a symbolic link, only the link is removed."""
    if isinstance(folder, Path) and folder.is_symlink():
        folder.unlink()
        return
    # The manifest goes first, so that a partly removed checkpoint does not look committed.
    storage_of(folder).remove_folder(first=MANIFEST)
