"""Folder of a local run: the job of the run, and its results so far."""

import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pseudoreal_api.base import ApiModel
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.resolved.resolve import object_storage, phase_config
from pseudoreal_api.spec.job import PseudoRealJob
from pydantic import ValidationError

from pseudoreal_trainer.checkpoint.manifest import Head
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.storage.durable import write_atomically
from pseudoreal_trainer.storage.path import storage_path

RECORD = "job.json"
"""Name of the file with the job, in the folder of a run."""

_CHANGEABLE = ("logging", "pod", "scheduling", "restart", "hang", "deadlines", "cleanUp", "requests", "suspend")
"""Spec fields that may change between two runs, as on a cluster while the job is suspended."""
_CHANGEABLE_IN_PHASES = ("pod", "resources")
_GROWING = ("step", "tokens")
"""Bounds of `until` that may grow in the last phase."""

Json = dict[str, Any]


class _Record(ApiModel):
    """Content of the file `RECORD`."""

    uid: str
    execution: int
    job: PseudoRealJob


@dataclass(frozen=True)
class RunDirectory:
    path: Path
    job: PseudoRealJob
    """The job, with the uid assigned at the start of the run."""
    execution: int

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(storage_path(object_storage(self.job) or str(self.path)), self.job.metadata.uid)

    def phase_config(self, index: int) -> PhaseConfig:
        work = self.path.resolve()
        return phase_config(
            self.job,
            index,
            execution=self.execution,
            work_directory=str(work),
            offload_directory=str(work / "offload"),
        )

    def final_checkpoint(self, index: int) -> Head | None:
        """Return the final checkpoint of the phase at `index`; None if the phase is unfinished."""
        config = self.phase_config(index)
        return next((head for head in self.store.committed(config.phase) if head.ends_phase(config)), None)


def open_run(path: Path, job: PseudoRealJob, *, resume: bool) -> RunDirectory:
    """Open the folder of a run, new or resumed.

    Raises InvalidJobError in these cases: the folder cannot be created, read or written; the folder holds a run and
    `resume` is False; the run is of another release; an immutable spec field of the run has another value.
    """
    try:
        return _open(path, job, resume=resume)
    except OSError as error:
        raise InvalidJobError(
            f"the work directory {path} cannot be made, read or written to: {error}; choose another one with --workdir"
        ) from error


def recorded_job(path: Path) -> PseudoRealJob:
    """Return the job of the run in the folder `path`. Raises InvalidJobError if the record is of another release."""
    return _read(path / RECORD).job


def _open(path: Path, job: PseudoRealJob, *, resume: bool) -> RunDirectory:
    record_path = path / RECORD
    if not record_path.exists():
        record = _Record(uid=str(uuid.uuid4()), execution=0, job=job)
    elif resume:
        record = _read(record_path)
        job = _with_recorded_sharding(job, record.job)
        _check_unchanged(record.job.spec.to_dict(), job.spec.to_dict(), record_path)
    else:
        raise InvalidJobError(f"{path} already holds a run; go on with it by --resume, or choose another --workdir")
    record = record.model_copy(update={"execution": record.execution + 1, "job": job})
    path.mkdir(parents=True, exist_ok=True)
    write_atomically(record_path, record.to_json(indent=2))
    metadata = job.metadata.model_copy(update={"uid": record.uid})
    return RunDirectory(path, job.model_copy(update={"metadata": metadata}), record.execution)


def _read(record: Path) -> _Record:
    try:
        return _Record.model_validate_json(record.read_bytes())
    except ValidationError as error:
        raise InvalidJobError(
            f"{record} is not of this release; finish the run with the release that began it, or choose another"
            " --workdir"
        ) from error


def _with_recorded_sharding(job: PseudoRealJob, recorded: PseudoRealJob) -> PseudoRealJob:
    """Return the job with stateSharding None in each phase that omits it and is recorded with None.

    None was the default up to release 0.3.0, and records have defaults. On a cluster, the API server has stored it.
    """
    recorded_with_none = {phase.name for phase in recorded.spec.phases if phase.parallelism.state_sharding == "None"}
    phases = [
        phase.model_copy(update={"parallelism": phase.parallelism.model_copy(update={"state_sharding": "None"})})
        if phase.name in recorded_with_none and phase.parallelism.state_sharding is None
        else phase
        for phase in job.spec.phases
    ]
    return job.model_copy(update={"spec": job.spec.model_copy(update={"phases": phases})})


def _check_unchanged(before: Json, now: Json, record: Path) -> None:
    """Raise InvalidJobError for changes that the API server refuses on a suspended job.

    Allowed are additional phases, a later end of the last phase, and fields that decide only where and how pods run.
    """
    phases = len(before["phases"])
    field = first_difference(_immutable(before, phases), _with_old_bounds(_immutable(now, phases), before), "spec")
    if field is not None:
        raise InvalidJobError(f"{field} differs from the run's own in {record}; undo that, or choose another --workdir")


def _immutable(spec: Json, phases: int) -> Json:
    """Return the spec without changeable fields, and with only its first `phases` phases."""
    kept = [_without(phase, _CHANGEABLE_IN_PHASES) for phase in spec["phases"][:phases]]
    return _without(spec, _CHANGEABLE) | {"phases": kept}


def _without(fields: Json, names: tuple[str, ...]) -> Json:
    return {name: value for name, value in fields.items() if name not in names}


def _with_old_bounds(now: Json, before: Json) -> Json:
    """Return the spec `now`, in which the grown bounds of the last phase are reset to the bounds in `before`."""
    *earlier, last = now["phases"]
    old = before["phases"][-1]["until"]
    grown = {name: old[name] for name in _GROWING if name in old and last["until"].get(name, 0) >= old[name]}
    return now | {"phases": [*earlier, last | {"until": last["until"] | grown}]}


def first_difference(before: Any, now: Any, path: str) -> str | None:
    """Return the path of the first difference, with both values; None if the two are equal."""
    if isinstance(before, dict) and isinstance(now, dict):
        pairs = [(f"{path}.{key}", before.get(key), now.get(key)) for key in sorted(before.keys() | now.keys())]
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = [(f"{path}[{i}]", old, new) for i, (old, new) in enumerate(zip(before, now, strict=True))]
    else:
        return None if before == now else f"{path} {json.dumps(now)} (was {json.dumps(before)})"
    return next((found for p, old, new in pairs if (found := first_difference(old, new, p))), None)
