"""The folder of a local run: which job it belongs to, and what it holds already."""

import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pseudoreal_api.base import ApiModel
from pseudoreal_api.resolved.resolve import object_storage
from pseudoreal_api.spec.job import PseudoRealJob

from pseudoreal_trainer.checkpoint.manifest import Manifest
from pseudoreal_trainer.checkpoint.storage.durable import write_atomically
from pseudoreal_trainer.checkpoint.storage.place import place_of
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.errors import InvalidJobError


class _Record(ApiModel):
    """The content of job.json."""

    uid: str
    attempt: int
    job: PseudoRealJob


@dataclass(frozen=True)
class RunDirectory:
    path: Path
    job: PseudoRealJob
    """The job, with the uid that the run was given when it began."""
    attempt: int

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(place_of(object_storage(self.job) or str(self.path)), self.job.metadata.uid)

    def finished(self, phase: str) -> Manifest | None:
        """The checkpoint that ends the phase, once it is there."""
        return next((m for m in self.store.committed(phase) if m.phase_complete), None)


def open_run(path: Path, job: PseudoRealJob, *, resume: bool) -> RunDirectory:
    """The folder of a run, which begins or resumes. Raises InvalidJobError when the folder holds a run that is not to
    be resumed, or one of another spec."""
    record_path = path / "job.json"
    if not record_path.exists():
        record = _Record(uid=str(uuid.uuid4()), attempt=0, job=job)
    elif resume:
        record = _Record.model_validate_json(record_path.read_bytes())
        _refuse_changes(record.job.spec.to_dict(), job.spec.to_dict(), record_path)
    else:
        raise InvalidJobError(f"{path} already holds a run; go on with it by --resume, or choose another --workdir")
    record = record.model_copy(update={"attempt": record.attempt + 1})
    path.mkdir(parents=True, exist_ok=True)
    write_atomically(record_path, record.to_json(indent=2))
    metadata = job.metadata.model_copy(update={"uid": record.uid})
    return RunDirectory(path, job.model_copy(update={"metadata": metadata}), record.attempt)


def _refuse_changes(before: dict[str, Any], now: dict[str, Any], record: Path) -> None:
    field = first_difference(before, now, "spec")
    if field is not None:
        raise InvalidJobError(f"{field} differs from the run's own in {record}; undo that, or choose another --workdir")


def first_difference(before: Any, now: Any, path: str) -> str | None:
    """The path of the first value that differs, with both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        pairs = [(f"{path}.{key}", before.get(key), now.get(key)) for key in sorted(before.keys() | now.keys())]
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = [(f"{path}[{i}]", old, new) for i, (old, new) in enumerate(zip(before, now, strict=True))]
    else:
        return None if before == now else f"{path} {json.dumps(now)} (was {json.dumps(before)})"
    return next((found for p, old, new in pairs if (found := first_difference(old, new, p))), None)
