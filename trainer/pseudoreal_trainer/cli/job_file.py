"""Reads a job's YAML file for `pseudoreal run`."""

from pathlib import Path
from typing import Any

import yaml
from pseudoreal_api.base import KIND, ApiModel
from pseudoreal_api.resolved.check import check_resolvable
from pseudoreal_api.resolved.resolve import UnresolvableJob
from pseudoreal_api.spec.check import InvalidJob, check_job
from pseudoreal_api.spec.checkpoint import Checkpoint, Storage
from pseudoreal_api.spec.job import PseudoRealJob, PseudoRealJobSpec
from pydantic.alias_generators import to_camel

from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.storage.path import SCHEME

_RECOVERY = ("restart", "hang", "deadlines", "clean_up", "requests", "suspend", "managed_by")
_CLUSTER_ONLY = ("pod", "network", "scheduling", *_RECOVERY)
_POD = ("resources", "pod")
"""Fields of a phase for its pods only."""


def read_job(path: Path) -> PseudoRealJob:
    """Read the file's only job and check it; relative paths of text and weights are resolved against the file's folder.

    Raises InvalidJobError with one sentence per line.
    """
    # Imported here, because planning a job needs neither its text nor numpy.
    from pseudoreal_trainer.data.corpus import corpus_files

    job = parse_job(path)
    folder = path.resolve().parent
    data = job.spec.data.model_copy(update={"path": str(folder / job.spec.data.path)})
    if not data.sources:
        corpus_files(data)
    changes = {"data": data, "checkpoint": _with_weights(job.spec.checkpoint, folder)}
    return job.model_copy(update={"spec": job.spec.model_copy(update=changes)})


def _with_weights(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """Return `checkpoint` with the relative path of weights to start from resolved against the folder."""
    start = checkpoint.start_from
    if start is None or start.hugging_face is None or start.hugging_face.path.startswith(SCHEME):
        return checkpoint
    weights = start.hugging_face.model_copy(update={"path": str(folder / start.hugging_face.path)})
    return checkpoint.model_copy(update={"start_from": start.model_copy(update={"hugging_face": weights})})


def parse_job(path: Path) -> PseudoRealJob:
    """Read the file's only job and check it, without its text. Raises InvalidJobError."""
    try:
        job = check_job(_only_job(path))
        check_resolvable(job.spec)
    except (InvalidJob, UnresolvableJob) as error:
        raise InvalidJobError(str(error)) from error
    return job


def _only_job(path: Path) -> dict[str, Any]:
    try:
        documents = [d for d in yaml.safe_load_all(path.read_text()) if isinstance(d, dict)]
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise InvalidJobError(f"{path} cannot be read: {error}") from error
    jobs = [document for document in documents if document.get("kind") == KIND]
    if len(jobs) != 1:
        raise InvalidJobError(f"{path} holds {len(jobs)} documents of kind {KIND}; it must hold exactly one")
    return jobs[0]


def notice(spec: PseudoRealJobSpec) -> str:
    """Return a phrase listing the file's fields ignored by a local run."""
    ignored = [f"spec.{to_camel(field)}" for field in _CLUSTER_ONLY if _is_set(spec, field)]
    ignored += ["spec.data.volume"] if spec.data.volume is not None else []
    start = spec.checkpoint.start_from
    ignored += ["spec.checkpoint.startFrom.huggingFace.volume"] if start is not None and start.mounted else []
    ignored += [f"spec.phases[{p.name}].{field}" for field in _POD for p in spec.phases if _is_set(p, field)]
    ignored += _ignored_storage(spec.checkpoint.storage)
    ignored += [f"spec.phases[{p.name}].offload.volume" for p in spec.phases if p.offload.volume is not None]
    return f"ignored in a local run: {', '.join(ignored) or 'nothing'}"


def _ignored_storage(storage: Storage) -> list[str]:
    ignored = ["spec.checkpoint.storage.volume"] if storage.volume is not None else []
    objects = storage.object_storage
    has_secret = objects is not None and objects.credentials_secret_name is not None
    return ignored + (["spec.checkpoint.storage.objectStorage.credentialsSecretName"] if has_secret else [])


def _is_set(model: ApiModel, field: str) -> bool:
    return field in model.model_fields_set
