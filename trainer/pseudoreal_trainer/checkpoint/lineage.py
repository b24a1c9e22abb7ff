"""The chain of jobs that a job continues: the job named in its configuration, then the job named in that job's
lineage.json, and so on.

`<work directory>/lineage.json` keeps facts about a job that must outlive the deletion of its PseudoRealJob.
"""

from collections import defaultdict
from typing import Annotated

from pseudoreal_api.base import ApiModel
from pseudoreal_api.resolved.config import DiscardConfig, PhaseConfig
from pydantic import Field, ValidationError

from pseudoreal_trainer.checkpoint.heads import unreadable
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.storage.path import StoragePath, storage_path
from pseudoreal_trainer.storage.storage import storage_of

LINEAGE = "lineage.json"


class Lineage(ApiModel):
    """Facts about this job for the jobs that continue it."""

    continues: Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")] | None = Field(
        None, description="Name of the folder, beside its own, of the job that it continues."
    )
    discards: dict[str, list[DiscardConfig]] = Field({}, description="Phase -> which of its checkpoints count no more.")


def remember_lineage(config: PhaseConfig) -> None:
    """Write lineage.json of the job. Raises TrainingError if the file cannot be written."""
    continues = None if config.continues is None else storage_path(config.continues).name
    path = storage_path(config.storage) / LINEAGE
    try:
        storage_of(path).replace(Lineage(continues=continues, discards=config.discards or {}).to_json())
    except OSError as error:
        raise TrainingError(f"{path} cannot be written: {error}") from error


def continued_stores(config: PhaseConfig) -> list[CheckpointStore]:
    """Return the stores of the jobs that this job continues, the nearest job first. A job's discard rules
    marked `continued` apply to the stores of all jobs that it continues, directly or not. Raises TrainingError if a
    lineage.json cannot be read."""
    found: list[CheckpointStore] = []
    seen = {storage_path(config.storage)}
    rules: dict[str, list[DiscardConfig]] = defaultdict(list)
    folder, discards = (None if config.continues is None else storage_path(config.continues)), config.discards or {}
    while folder is not None and folder not in seen:
        seen.add(folder)
        for phase, of_phase in discards.items():
            rules[phase] += [rule for rule in of_phase if rule.continued]
        lineage = _lineage(folder)
        found.append(
            CheckpointStore(folder, None, {phase: [*known] for phase, known in rules.items()}, lineage.discards)
        )
        folder = None if lineage.continues is None else folder.parent / lineage.continues
        discards = lineage.discards
    return found


def _lineage(folder: StoragePath) -> Lineage:
    path = folder / LINEAGE
    try:
        return Lineage.model_validate_json(storage_of(path).read())
    except (FileNotFoundError, NotADirectoryError):
        return Lineage()
    except ValidationError as error:
        raise TrainingError(f"{path} makes no sense: {error}; restore it, or remove it to do without") from error
    except OSError as error:
        raise unreadable(folder, error) from error
