"""The checkpoints of one job: safetensors files and a manifest each. Knows arrays, not torch.

`<work directory>/checkpoints/<phase>-<step>/{model.safetensors, optimizer.safetensors, manifest.json}`
"""

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import structlog
from pydantic import ValidationError
from safetensors import SafetensorError

from pseudoreal_trainer.durable import sync, write_atomically
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.manifest import FileDigest, Manifest
from pseudoreal_trainer.tensor_file import Array, Form, TensorFile, TensorWriter

MANIFEST = "manifest.json"
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
FIRST_MOMENT, SECOND_MOMENT, STEP = "first_moment", "second_moment", "step"
"""Ends of the names in the optimizer's file; before them stand a dot and, before that, the parameter's name."""

Arrays = Mapping[str, Array]

log = structlog.get_logger()


class CorruptCheckpoint(TrainingError):
    """A committed checkpoint whose files are not what its manifest says."""


@dataclass(frozen=True)
class Checkpoint:
    manifest: Manifest
    model: Arrays
    optimizer: Arrays


@dataclass(frozen=True)
class CheckpointStore:
    """All checkpoints of the job with this uid below its work directory."""

    work_directory: Path
    job_uid: str

    @property
    def folder(self) -> Path:
        return self.work_directory / "checkpoints"

    def committed(self, phase: str | None = None) -> list[Manifest]:
        """Oldest first. Raises TrainingError when one belongs to another job."""
        found = [read_manifest(path.parent) for path in self.folder.glob(f"*/{MANIFEST}")]
        mine = [self._own(manifest) for manifest in found if manifest is not None]
        ordered = sorted(mine, key=lambda m: (m.phase_index, m.step))
        return [m for m in ordered if phase in (None, m.phase)]

    def load_newest(self, phase: str, *, complete: bool = False) -> Checkpoint | None:
        """The newest checkpoint of a phase whose digests match; with `complete`, of those that end the phase.

        None when the phase has no committed checkpoint. Raises CorruptCheckpoint when it has some and none is sound.
        """
        candidates = [m for m in self.committed(phase) if m.phase_complete or not complete]
        for manifest in reversed(candidates):
            try:
                return self.load(manifest)
            except CorruptCheckpoint as error:
                log.warning("checkpoint_corrupt", checkpoint=manifest.name, error=str(error))
        if candidates:
            raise CorruptCheckpoint(
                f"every checkpoint of phase {phase} in {self.folder} is corrupt:"
                f" {', '.join(m.name for m in candidates)}; restore one, or delete them to train the phase anew"
            )
        return None

    def load(self, manifest: Manifest) -> Checkpoint:
        """Raises CorruptCheckpoint, naming the file."""
        model, optimizer = (self._load_file(manifest, name) for name in (MODEL_FILE, OPTIMIZER_FILE))
        return Checkpoint(manifest, model, optimizer)

    def save(self, checkpoint: Checkpoint) -> Manifest:
        """Commits; what stood under the same name is replaced. The result holds the digests."""
        forms = [
            {n: Form(a.shape, a.dtype.name) for n, a in x.items()} for x in (checkpoint.model, checkpoint.optimizer)
        ]
        with self.begin(checkpoint.manifest, *forms) as saving:
            for writer, arrays in ((saving.model, checkpoint.model), (saving.optimizer, checkpoint.optimizer)):
                for name, array in arrays.items():
                    writer.write(name, array)
            return saving.commit()

    def begin(self, manifest: Manifest, model: Mapping[str, Form], optimizer: Mapping[str, Form]) -> "Saving":
        """A checkpoint that is written tensor after tensor; what stood under the same name is gone."""
        folder = self.folder / manifest.name
        _remove(folder)
        folder.mkdir(parents=True)
        writers = TensorWriter(folder / MODEL_FILE, model), TensorWriter(folder / OPTIMIZER_FILE, optimizer)
        return Saving(folder, manifest, *writers)

    def digest(self, manifest: Manifest) -> str:
        """SHA-256 of the manifest, and so of everything that it names."""
        return _digest(self.folder / manifest.name / MANIFEST).sha256

    def prune(self, keep_last: int) -> None:
        """Removes all but the newest `keep_last` checkpoints and those at the ends of phases."""
        for manifest in [m for m in self.committed() if not m.is_boundary][:-keep_last]:
            _remove(self.folder / manifest.name)

    def _load_file(self, manifest: Manifest, name: str) -> Arrays:
        path = self.folder / manifest.name / name
        try:
            found, expected = _digest(path).sha256, manifest.files[name].sha256
            if found != expected:
                raise CorruptCheckpoint(f"{path} has the SHA-256 {found}; the manifest says {expected}")
            return TensorFile(path)
        except (OSError, SafetensorError) as error:
            raise CorruptCheckpoint(f"{path} cannot be read: {error}") from error

    def _own(self, manifest: Manifest) -> Manifest:
        if manifest.job.uid != self.job_uid:
            raise TrainingError(
                f"checkpoint {manifest.name} in {self.folder} belongs to job {manifest.job.name} with uid"
                f" {manifest.job.uid}, not {self.job_uid}; use another work directory"
            )
        return manifest


@dataclass(frozen=True)
class Saving:
    """A checkpoint on its way to the disk. Use as a context manager."""

    folder: Path
    manifest: Manifest
    model: TensorWriter
    optimizer: TensorWriter

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.model.__exit__()
        self.optimizer.__exit__()

    def commit(self) -> Manifest:
        """Everything is on the disk before the manifest is. The result holds the digests."""
        files = {}
        for name, writer in ((MODEL_FILE, self.model), (OPTIMIZER_FILE, self.optimizer)):
            sha256, size = writer.finish()
            sync(self.folder / name)
            files[name] = FileDigest(sha256=sha256, size=size)
        manifest = self.manifest.model_copy(update={"files": files})
        write_atomically(self.folder / MANIFEST, manifest.to_json(indent=2))
        sync(self.folder.parent)
        return manifest


def read_manifest(folder: Path) -> Manifest | None:
    """None, with a warning, when it cannot be read: such a checkpoint is taken as not committed."""
    try:
        return Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except (OSError, ValidationError) as error:
        log.warning("manifest_unreadable", checkpoint=folder.name, error=str(error).splitlines()[0])
        return None


def _forms(arrays: Arrays) -> dict[str, Form]:
    return {name: Form(array.shape, array.dtype.name) for name, array in arrays.items()}


def _remove(folder: Path) -> None:
    # The manifest goes first: a checkpoint that is half removed must not look committed.
    (folder / MANIFEST).unlink(missing_ok=True)
    if folder.exists():
        sync(folder)
        shutil.rmtree(folder)


def _digest(path: Path) -> FileDigest:
    with path.open("rb") as file:
        return FileDigest(sha256=hashlib.file_digest(file, "sha256").hexdigest(), size=path.stat().st_size)
