"""The checkpoints of one job: which there are, whether they are sound, which are removed.

`<work directory>/checkpoints/<phase>-<step>/{weights-*.safetensors, moments-*.safetensors, manifest.json}`
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TypeVar

import structlog
from pseudoreal_api.resolved.config import DelinkConfig, DiscardConfig, PhaseConfig

from pseudoreal_trainer.checkpoint.heads import MANIFEST, NAME, Heads, parse_manifest
from pseudoreal_trainer.checkpoint.manifest import FileDigest, Head, Manifest
from pseudoreal_trainer.checkpoint.manifest_text import manifest_text
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.retention import removable
from pseudoreal_trainer.checkpoint.storage.path import StoragePath, storage_path
from pseudoreal_trainer.checkpoint.storage.storage import storage_of
from pseudoreal_trainer.checkpoint.visible import await_size, read_as_seen
from pseudoreal_trainer.errors import TrainingError

_VERIFIED_AT_ONCE, _ASKED_AT_ONCE = 2, 16
"""Number of files that are verified at a time, and of those that are asked for their sizes."""

Discards = Mapping[str, Sequence[DiscardConfig]]

_H = TypeVar("_H", bound=Head)

log = structlog.get_logger()


class CorruptCheckpoint(TrainingError):
    """A committed checkpoint whose files are not what its manifest says."""


@dataclass(frozen=True)
class CheckpointStore:
    """All checkpoints of the job with this uid below its work directory. Without a uid: those of whatever job they are,
    whose executions all came before."""

    work_directory: StoragePath
    job_uid: str | None
    discards: Discards = field(default_factory=dict)
    """Phase -> rules for its checkpoints that count no more: they are as good as removed."""
    forgotten: Discards = field(default_factory=dict)
    """What another job had discarded of its own executions."""

    @property
    def folder(self) -> StoragePath:
        return self.work_directory / "checkpoints"

    @cached_property
    def _heads(self) -> Heads:
        return Heads(self.folder)

    def heads(self) -> list[Head]:
        """All committed checkpoints, of whatever job and whether or not they count, in no order."""
        return self._heads.all()

    def committed(self, phase: str | None = None) -> list[Head]:
        """The committed checkpoints that count, oldest first. Raises TrainingError when one belongs to another job or
        was written by a release with another format."""
        return self._counting(self._all(), phase)

    def _counting(self, heads: Sequence[Head], phase: str | None = None) -> list[Head]:
        ordered = sorted(heads, key=lambda head: (head.phase_index, head.step))
        return [head for head in ordered if phase in (None, head.phase) and not _hits(self.discards, head)]

    def whole(self, head: Head) -> Manifest:
        """The manifest with its tensors and files. Raises CorruptCheckpoint when it makes no sense."""
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
        """The newest checkpoint of a phase whose digests match; with `complete`, of those that end the phase.

        None when the phase has no committed checkpoint. Raises CorruptCheckpoint when it has some and none is sound.
        """
        candidates = self.candidates(phase, complete=complete)
        for head in candidates:
            try:
                manifest = self.whole(head)
                self.verify(manifest)
                return self.reader(manifest)
            except CorruptCheckpoint as error:
                log.warning("checkpoint_corrupt", checkpoint=head.name, error=str(error))
        if candidates:
            raise self.all_corrupt(phase, [head.name for head in candidates])
        return None

    def candidates(self, phase: str, *, complete: bool = False) -> list[Head]:
        """The committed checkpoints of a phase, newest first; not verified."""
        return [m for m in reversed(self.committed(phase)) if m.phase_complete or not complete]

    def all_corrupt(self, phase: str, names: Sequence[str]) -> CorruptCheckpoint:
        """The error that none of a phase's checkpoints is sound. `names`: empty on a rank that was not told them."""
        which = f": {', '.join(names)}" if names else ""
        return CorruptCheckpoint(
            f"every checkpoint of phase {phase} in {self.folder} is corrupt{which}; restore one, or delete them to"
            " train the phase anew"
        )

    def reader(self, head: Head) -> Reader:
        return Reader(self.whole(head), self.folder)

    def verify(self, head: Head, part: int = 0, parts: int = 1) -> None:
        """Compares the files with their digests, or one of `parts` equal parts of them.

        Raises CorruptCheckpoint, naming the file.
        """
        manifest = self.whole(head)
        folder = self.folder / manifest.data_folder
        # A digest takes longer than to read what it is of, and is made without Python's lock.
        with ThreadPoolExecutor(_VERIFIED_AT_ONCE, "verify") as pool:
            for _ in pool.map(lambda file: _verify_file(folder / file[0], file[1]), _part(manifest, part, parts)):
                pass

    def check_sizes(self, manifest: Manifest, part: int = 0, parts: int = 1) -> None:
        """Compares the sizes of the files that `verify` reads with the manifest. Raises CorruptCheckpoint, naming the
        file, when one is not there or has another size."""
        folder = self.folder / manifest.data_folder
        with ThreadPoolExecutor(_ASKED_AT_ONCE, "sizes") as pool:
            for _ in pool.map(lambda file: _check_size(folder / file[0], file[1]), _part(manifest, part, parts)):
                pass

    def as_seen(self, name: str, digest: str) -> Manifest:
        """The checkpoint of this name and digest, which the first rank has chosen.

        Raises TrainingError when this rank does not see it in time, and CorruptCheckpoint when it makes no sense.
        """
        return self._whole(name, read_as_seen(self.folder / name / MANIFEST, digest))

    def await_files(self, manifest: Manifest, part: int, parts: int) -> None:
        """Waits until this rank sees the files that it verifies. Raises TrainingError when it does not in time."""
        for name, file in _part(manifest, part, parts):
            await_size(self.folder / manifest.data_folder / name, file.size)

    def begin(self, head: Head) -> StoragePath:
        """An empty folder for the checkpoint; what stood under the same name is removed."""
        folder = self.folder / head.name
        if storage_of(folder / MANIFEST).exists():
            for name in _linked(self._heads.all(), head.name):
                self._remove(name)
        self._remove(head.name)
        storage_of(folder).make_folder()
        return folder

    def commit(self, manifest: Manifest) -> None:
        """Commits a checkpoint by writing its manifest. All its files must have been stored since `begin`."""
        storage_of(self.folder / manifest.name / MANIFEST).complete(manifest_text(manifest))
        self._heads.put(manifest.head)

    def restate(self, manifest: Manifest) -> None:
        """Replaces the manifest of a committed checkpoint, whose files stay."""
        storage_of(self.folder / manifest.name / MANIFEST).replace(manifest_text(manifest))
        self._heads.put(manifest.head)

    def digest(self, head: Head) -> str:
        """SHA-256 of the manifest, which covers everything that the manifest names."""
        return hashlib.sha256(storage_of(self.folder / head.name / MANIFEST).read()).hexdigest()

    def prune(
        self,
        keep_last: int,
        keep_every: int | None,
        verified: Sequence[str] = (),
        may_remove: Callable[[], None] | None = None,
    ) -> list[str]:
        """Removes what is discarded, and what the policy does not keep: the names of what went. `verified` are known to
        be sound. `may_remove` raises where nothing may be removed any more; it is called before each removal."""
        heads = self._all()
        discarded = [head.name for head in heads if _hits(self.discards, head)]
        # First those that refer to the files of others.
        gone = dict.fromkeys(chain.from_iterable((*_linked(heads, name), name) for name in discarded))
        left = [head for head in heads if head.name not in gone]
        names = [head.name for head in removable(self._counting(left), keep_last, keep_every, verified)]
        for name in [*gone, *names]:
            if may_remove is not None:
                may_remove()
            self._remove(name)
        return discarded + names

    def names(self) -> set[str]:
        """Names of everything that looks like a checkpoint, committed or not."""
        return {folder.name for folder in storage_of(self.folder).folders() if NAME.fullmatch(folder.name)}

    def sweep(self, names: Set[str], may_remove: Callable[[], None] | None = None) -> None:
        """Removes those of `names` that are not committed: an execution was killed, or failed, while it saved or
        removed them. What has another name may belong to a writer that is still at work. `may_remove`: as in
        `prune`."""
        for name in sorted(self.names() & names):
            if name not in self._heads and not storage_of(self.folder / name / MANIFEST).exists():
                log.info("unfinished_checkpoint_removed", checkpoint=name)
                if may_remove is not None:
                    may_remove()
                self._remove(name)

    def _all(self) -> list[Head]:
        """All committed checkpoints, those that are discarded included, in no order."""
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


def _linked(heads: Sequence[Head], name: str) -> list[str]:
    """Names of the checkpoints that refer to the files of `name`. They are removed before it is: at no moment does a
    checkpoint refer to what is not there."""
    return [head.name for head in heads if head.link is not None and head.link.folder == name]


def _part(manifest: Manifest, part: int, parts: int) -> list[tuple[str, FileDigest]]:
    """The files of one of `parts` equal parts, in the order of their names."""
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
        # It may be sound: to start from an older one would throw training away.
        raise TrainingError(
            f"{path} cannot be read: {error}; if that stays so, move the checkpoint away to go on from the one before"
        ) from error


def _hits(discards: Discards, head: Head) -> bool:
    rules = discards.get(head.phase, ())
    return any(head.execution < rule.before_execution and head.step >= rule.from_step for rule in rules)


def store_of(config: PhaseConfig | DelinkConfig) -> CheckpointStore:
    return CheckpointStore(storage_path(config.storage), config.job.uid, config.discards or {})


def remove(folder: StoragePath) -> None:
    """Removes a checkpoint; of one that is a symbolic link, the link alone."""
    if isinstance(folder, Path) and folder.is_symlink():
        folder.unlink()
        return
    # A checkpoint that is half removed must not look committed.
    storage_of(folder).remove_folder(first=MANIFEST)
