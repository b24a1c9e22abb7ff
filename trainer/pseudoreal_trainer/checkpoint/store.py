"""The checkpoints of one job: which there are, whether they are sound, which are removed.

`<work directory>/checkpoints/<phase>-<step>/{weights-*.safetensors, moments-*.safetensors, manifest.json}`
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from pseudoreal_api.resolved.config import DelinkConfig, DiscardConfig, PhaseConfig
from pydantic import ValidationError

from pseudoreal_trainer.checkpoint.manifest import FORMAT_VERSION, FileDigest, Manifest
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.retention import removable
from pseudoreal_trainer.checkpoint.storage.path import StoragePath, storage_path
from pseudoreal_trainer.checkpoint.storage.storage import storage_of
from pseudoreal_trainer.checkpoint.visible import await_size, read_as_seen
from pseudoreal_trainer.errors import TrainingError

MANIFEST = "manifest.json"
_VERIFIED_AT_ONCE = 2
"""Number of files that are verified at a time."""
_NAME = re.compile(r"[a-z][-a-z0-9]*-\d{8,}")
_FOR_EARLIER = (
    "finish the job with the release that wrote it, 0.3 or earlier, or begin anew in a new job or work directory"
)
_FOR_LATER = "use the release that wrote it, or move the checkpoint away to go on from the one before"

Discards = Mapping[str, Sequence[DiscardConfig]]

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

    def committed(self, phase: str | None = None) -> list[Manifest]:
        """The committed checkpoints that count, oldest first. Raises TrainingError when one belongs to another job or
        was written by a release with another format."""
        ordered = sorted(self._all(), key=lambda m: (m.phase_index, m.step))
        return [m for m in ordered if phase in (None, m.phase) and not self._is_discarded(m)]

    def newest(self, phase: str, *, complete: bool = False) -> Reader | None:
        """The newest checkpoint of a phase whose digests match; with `complete`, of those that end the phase.

        None when the phase has no committed checkpoint. Raises CorruptCheckpoint when it has some and none is sound.
        """
        candidates = self.candidates(phase, complete=complete)
        for manifest in candidates:
            try:
                self.verify(manifest)
                return self.reader(manifest)
            except CorruptCheckpoint as error:
                log.warning("checkpoint_corrupt", checkpoint=manifest.name, error=str(error))
        if candidates:
            raise self.all_corrupt(phase, [manifest.name for manifest in candidates])
        return None

    def candidates(self, phase: str, *, complete: bool = False) -> list[Manifest]:
        """The committed checkpoints of a phase, newest first; not verified."""
        return [m for m in reversed(self.committed(phase)) if m.phase_complete or not complete]

    def all_corrupt(self, phase: str, names: Sequence[str]) -> CorruptCheckpoint:
        """The error that none of a phase's checkpoints is sound. `names`: empty on a rank that was not told them."""
        which = f": {', '.join(names)}" if names else ""
        return CorruptCheckpoint(
            f"every checkpoint of phase {phase} in {self.folder} is corrupt{which}; restore one, or delete them to"
            " train the phase anew"
        )

    def reader(self, manifest: Manifest) -> Reader:
        return Reader(manifest, self.folder)

    def verify(self, manifest: Manifest, part: int = 0, parts: int = 1) -> None:
        """Compares the files with their digests, or one of `parts` equal parts of them.

        Raises CorruptCheckpoint, naming the file.
        """
        folder, names = self.folder / manifest.data_folder, sorted(manifest.files)[part::parts]
        # A digest takes longer than to read what it is of, and is made without Python's lock.
        with ThreadPoolExecutor(_VERIFIED_AT_ONCE, "verify") as pool:
            for _ in pool.map(lambda name: self._verify_file(folder / name, manifest.files[name]), names):
                pass

    def check_sizes(self, manifest: Manifest) -> None:
        """Compares the files' sizes with the manifest. Raises CorruptCheckpoint, naming the file, when one is not there
        or has another size."""
        for name, file in manifest.files.items():
            self._check_size(self.folder / manifest.data_folder / name, file)

    def as_seen(self, name: str, digest: str) -> Manifest:
        """The checkpoint of this name and digest, which another rank has chosen, once this one sees all its files.

        Raises TrainingError when it does not in time.
        """
        manifest = self._own(Manifest.model_validate_json(read_as_seen(self.folder / name / MANIFEST, digest)))
        for file, expected in manifest.files.items():
            await_size(self.folder / manifest.data_folder / file, expected.size)
        return manifest

    def begin(self, manifest: Manifest) -> StoragePath:
        """An empty folder for the checkpoint; what stood under the same name is removed."""
        folder = self.folder / manifest.name
        if storage_of(folder / MANIFEST).exists():
            self._remove_with_links(manifest.name)
        remove(folder)
        storage_of(folder).make_folder()
        return folder

    def commit(self, manifest: Manifest) -> None:
        """Commits a checkpoint by writing its manifest. All its files must have been stored since `begin`."""
        storage_of(self.folder / manifest.name / MANIFEST).complete(manifest.to_json(indent=1))

    def restate(self, manifest: Manifest) -> None:
        """Replaces the manifest of a committed checkpoint, whose files stay."""
        storage_of(self.folder / manifest.name / MANIFEST).replace(manifest.to_json(indent=1))

    def digest(self, manifest: Manifest) -> str:
        """SHA-256 of the manifest, which covers everything that the manifest names."""
        return hashlib.sha256(storage_of(self.folder / manifest.name / MANIFEST).read()).hexdigest()

    def prune(self, keep_last: int, keep_every: int | None, verified: Sequence[str] = ()) -> list[str]:
        """Removes what is discarded, and what the policy does not keep: the names of what went. `verified` are known to
        be sound."""
        discarded = [manifest.name for manifest in self._all() if self._is_discarded(manifest)]
        for name in discarded:
            self._remove_with_links(name)
        names = [manifest.name for manifest in removable(self.committed(), keep_last, keep_every, verified)]
        for name in names:
            remove(self.folder / name)
        return discarded + names

    def names(self) -> set[str]:
        """Names of everything that looks like a checkpoint, committed or not."""
        return {folder.name for folder in storage_of(self.folder).folders() if _NAME.fullmatch(folder.name)}

    def sweep(self, names: Set[str]) -> None:
        """Removes those of `names` that are not committed: an execution was killed, or failed, while it saved or
        removed them. What has another name may belong to a writer that is still at work."""
        for name in self.names() & names:
            if not storage_of(self.folder / name / MANIFEST).exists():
                log.info("unfinished_checkpoint_removed", checkpoint=name)
                remove(self.folder / name)

    def _all(self) -> list[Manifest]:
        """All committed checkpoints, those that are discarded included, in no order."""
        return [self._own(m) for m in manifests_in(self.folder) if not _hits(self.forgotten, m)]

    def _is_discarded(self, manifest: Manifest) -> bool:
        return _hits(self.discards, manifest)

    def _remove_with_links(self, name: str) -> None:
        """Removes a checkpoint, and first those that refer to its files: at no moment does a checkpoint refer to what
        is not there."""
        links = [m.name for m in manifests_in(self.folder) if m.link is not None and m.link.folder == name]
        for folder in [*links, name]:
            remove(self.folder / folder)

    def _verify_file(self, path: StoragePath, expected: FileDigest) -> None:
        self._check_size(path, expected)
        with _reading(path):
            found = storage_of(path).sha256()
        if found != expected.sha256:
            raise CorruptCheckpoint(f"{path} has the SHA-256 {found}; the manifest says {expected.sha256}")

    def _check_size(self, path: StoragePath, expected: FileDigest) -> None:
        with _reading(path):
            size = storage_of(path).size()
        if size != expected.size:
            raise CorruptCheckpoint(f"{path} has {size:,} bytes; the manifest says {expected.size:,}")

    def _own(self, manifest: Manifest) -> Manifest:
        if self.job_uid is None:
            return manifest.revised(execution=0)
        if manifest.job.uid != self.job_uid:
            raise TrainingError(
                f"checkpoint {manifest.name} in {self.folder} belongs to job {manifest.job.name} with uid"
                f" {manifest.job.uid}, not {self.job_uid}; use another work directory"
            )
        return manifest


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


def _hits(discards: Discards, manifest: Manifest) -> bool:
    rules = discards.get(manifest.phase, ())
    return any(manifest.execution < rule.before_execution and manifest.step >= rule.from_step for rule in rules)


def store_of(config: PhaseConfig | DelinkConfig) -> CheckpointStore:
    return CheckpointStore(storage_path(config.storage), config.job.uid, config.discards or {})


def manifests_in(checkpoints: StoragePath) -> list[Manifest]:
    """Manifests of all committed checkpoints, in no order. A folder with the manifest of another one, such as a copy
    that somebody put aside, is none: whoever removes or reads a checkpoint takes the folder with its name."""
    try:
        folders = [path.parent for path in storage_of(checkpoints).find(MANIFEST)]
    except OSError as error:
        raise unknown(checkpoints, error) from error
    return [manifest for folder in folders if (manifest := _manifest_of(folder)) is not None]


def _manifest_of(folder: StoragePath) -> Manifest | None:
    manifest = read_manifest(folder)
    if manifest is None or manifest.name == folder.name:
        return manifest
    log.warning("manifest_of_another_folder", folder=folder.name, checkpoint=manifest.name)
    return None


def read_manifest(folder: StoragePath) -> Manifest | None:
    """The manifest of a folder; None, with a warning, when it makes no sense: such a checkpoint is taken as not
    committed. Raises TrainingError when it cannot be read, or has another format version: to start from an older
    checkpoint would throw its training away."""
    try:
        text = storage_of(folder / MANIFEST).read()
        return Manifest.model_validate_json(text)
    except FileNotFoundError:
        return None  # it was removed meanwhile
    except OSError as error:
        raise unknown(folder, error) from error
    except ValidationError as error:
        _refuse_other_version(folder, text)
        log.warning("manifest_unreadable", checkpoint=folder.name, error=str(error).splitlines()[0])
    return None


def unknown(path: StoragePath, error: OSError) -> TrainingError:
    return TrainingError(f"{path} cannot be read, so nobody knows which checkpoint is the newest: {error}")


def _refuse_other_version(folder: StoragePath, text: bytes) -> None:
    try:
        version = json.loads(text)["formatVersion"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return
    if isinstance(version, int) and version != FORMAT_VERSION:
        remedy = _FOR_EARLIER if version < FORMAT_VERSION else _FOR_LATER
        raise TrainingError(
            f"{folder / MANIFEST} has format version {version}, and this release reads {FORMAT_VERSION}; {remedy}"
        )


def remove(folder: StoragePath) -> None:
    """Removes a checkpoint; of one that is a symbolic link, the link alone."""
    if isinstance(folder, Path) and folder.is_symlink():
        folder.unlink()
        return
    # A checkpoint that is half removed must not look committed.
    storage_of(folder).remove_folder(first=MANIFEST)
