"""Everything that a page says about one job, from the files of the job. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from pseudoreal_api.resolved.config import PhaseConfig

from pseudoreal_trainer.checkpoint.manifest import Head
from pseudoreal_trainer.plan.memory.tiers import Tiers
from pseudoreal_trainer.plan.sizes import Device
from pseudoreal_trainer.report.lineage import Lineage, lineage_of
from pseudoreal_trainer.report.phases import (
    PhaseFacts,
    Transition,
    device_of,
    phases_of,
    predicted_memory,
    transitions_of,
)
from pseudoreal_trainer.report.reading import JobFiles
from pseudoreal_trainer.report.restarts import Restart, Run, restarts_of, runs_of
from pseudoreal_trainer.report.step_plan import StepPicture, step_picture
from pseudoreal_trainer.report.steps import Steps, read_steps
from pseudoreal_trainer.runtime.history import HistoryEntry

_MOST_PICTURES = 8
"""Most phases whose plan is drawn."""


@dataclass(frozen=True)
class Job:
    name: str
    label: str
    """Name on the page: `name`, with a part of the folder where two jobs have the same name."""
    folder: str
    uid: str | None
    steps: Steps
    phases: Sequence[PhaseFacts]
    transitions: Sequence[Transition]
    predicted: dict[str, Tiers]
    """Name of a phase -> bytes that `pseudoreal plan` predicts for rank 0."""
    on_gpu: bool
    pictures: Sequence[StepPicture]
    without_picture: Sequence[str]
    """Names of phases whose configuration is known, but whose plan is not drawn."""
    lineage: Lineage
    has_checkpoints: bool
    """Whether the checkpoints were read."""
    runs: Sequence[Run]
    restarts: Sequence[Restart]
    notices: Sequence[str]


def jobs_of(files: Sequence[JobFiles]) -> list[Job]:
    """Return what a page says about these jobs, in the same order, with labels that tell them apart."""
    names = [_identity(each.checkpoints, each.history)[0] or each.folder for each in files]
    own = _distinct_parts([each.folder for each in files])
    labels = [name if names.count(name) == 1 else f"{name} ({part})" for name, part in zip(names, own, strict=True)]
    return [_job(each, name, label) for each, name, label in zip(files, names, labels, strict=True)]


def _distinct_parts(folders: Sequence[str]) -> list[str]:
    """Return of each path the part in which it differs from the others: of runs/a/work and runs/b/work a and b."""
    parts = [[part for part in folder.split("/") if part] for folder in folders]
    shortest = min(map(len, parts))
    begin = next((n for n in range(shortest) if len({own[n] for own in parts}) > 1), 0)
    end = next((n for n in range(shortest - begin) if len({own[-1 - n] for own in parts}) > 1), 0)
    return ["/".join(own[begin : len(own) - end]) or folder for own, folder in zip(parts, folders, strict=True)]


def _job(files: JobFiles, name: str, label: str) -> Job:
    steps, phases = files.steps, phases_of(files.steps, files.checkpoints, files.history, files.configs)
    configs = [phase.config for phase in phases if phase.config is not None]
    texts = {config.phase: (config.to_json(), device_of(config, steps)) for config in configs}
    predicted = {phase: _predicted(*text) for phase, text in texts.items()}
    pictures = {config.phase: _picture(*texts[config.phase]) for config in configs[:_MOST_PICTURES]}
    return Job(
        name=name,
        label=label,
        folder=files.folder,
        uid=_identity(files.checkpoints, files.history)[1],
        steps=steps,
        phases=phases,
        transitions=transitions_of(phases),
        predicted={phase: found for phase, found in predicted.items() if found is not None},
        on_gpu=any(device_of(config, steps) == "accelerator" for config in configs) or steps.has("device_bytes"),
        pictures=[picture for picture in pictures.values() if picture is not None],
        without_picture=[config.phase for config in configs if pictures.get(config.phase) is None],
        lineage=lineage_of(files.checkpoints, steps if files.has_checkpoints else read_steps([])),
        has_checkpoints=files.has_checkpoints,
        runs=runs_of(files.history),
        restarts=restarts_of(files.history, steps),
        notices=files.notices,
    )


# A live page asks again with each step.
@lru_cache(maxsize=64)
def _predicted(config: str, device: Device) -> Tiers | None:
    return predicted_memory(PhaseConfig.model_validate_json(config, extra="ignore"), device)


@lru_cache(maxsize=64)
def _picture(config: str, device: Device) -> StepPicture | None:
    return step_picture(PhaseConfig.model_validate_json(config, extra="ignore"), device)


def _identity(heads: Sequence[Head], history: Sequence[HistoryEntry]) -> tuple[str | None, str | None]:
    """Return name and uid of the job; None: not known."""
    if heads:
        return heads[-1].job.name, heads[-1].job.uid
    given = next((entry.config["job"] for entry in reversed(history) if entry.config and "job" in entry.config), None)
    if not isinstance(given, dict):
        return None, None
    name, uid = given.get("name"), given.get("uid")
    return (name if isinstance(name, str) else None), (uid if isinstance(uid, str) else None)
