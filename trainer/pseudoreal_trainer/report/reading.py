"""Read the folder of a job, with bounds on everything: bytes of metrics, checkpoints, entries of the history, time."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pseudoreal_api.quantity import readable_bytes
from pydantic import ValidationError

from pseudoreal_trainer.checkpoint.heads import HeadCache
from pseudoreal_trainer.checkpoint.manifest import Head
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.report.steps import Steps, read_steps
from pseudoreal_trainer.runtime.history import HISTORY, HistoryEntry
from pseudoreal_trainer.storage.objects import read_beginnings
from pseudoreal_trainer.storage.path import ObjectPath, StoragePath
from pseudoreal_trainer.storage.storage import storage_of
from pseudoreal_trainer.training.metrics_file import MOST_LINE_BYTES, blocks_of_metrics


@dataclass(frozen=True)
class Bounds:
    """Most that is read of one job."""

    metrics_bytes: int = 1 << 30
    metrics_seconds: float = 120.0
    checkpoints: int = 2000
    entries: int = 500
    """Newest entries of the history."""
    entry_bytes: int = 1 << 16


@dataclass(frozen=True)
class JobFiles:
    """What the folder of a job says. `notices`: sentences about what is missing or was left out."""

    folder: str
    steps: Steps
    checkpoints: Sequence[Head] = ()
    history: Sequence[HistoryEntry] = ()
    """Oldest entry first."""
    notices: list[str] = field(default_factory=list)


USUAL_BOUNDS = Bounds()


def read_job_files(folder: StoragePath, bounds: Bounds = USUAL_BOUNDS) -> JobFiles:
    """Return what the folder says. Raises TrainingError if it is no folder of a job, or cannot be read."""
    notices: list[str] = []
    try:
        steps = read_steps(_lines(folder, bounds, notices))
        checkpoints = _checkpoints(folder, bounds, notices)
        history = _history(folder, bounds, notices)
    except OSError as error:
        raise TrainingError(f"{folder} cannot be read: {error}") from error
    if not (len(steps) or checkpoints or history):
        raise TrainingError(
            f"{folder} holds neither metrics nor checkpoints of a job; give its work directory, or the URL of the"
            " folder with checkpoints/"
        )
    if steps.unreadable:
        notices.append(f"{steps.unreadable:,} lines of the metrics make no sense, and are left out.")
    if not history:
        notices.append(
            "This job has no history/, which trainers record from release 0.4 on: times, causes, pods and nodes of"
            " restarts, the configuration of its phases and the memory that was predicted are not known."
        )
    return JobFiles(str(folder), steps, checkpoints, history, notices)


def _lines(folder: StoragePath, bounds: Bounds, notices: list[str]) -> Iterator[bytes]:
    """Yield the lines of the metrics, from the first on, within the bounds."""
    end, left, rest = time.monotonic() + bounds.metrics_seconds, bounds.metrics_bytes, b""
    try:
        for block in blocks_of_metrics(folder):
            left -= len(block)
            *lines, rest = (rest + block).split(b"\n")
            yield from lines
            if left <= 0:
                notices.append(f"Only the first {readable_bytes(bounds.metrics_bytes)} of the metrics are read.")
                return
            if time.monotonic() > end:
                notices.append(f"The metrics are read for {bounds.metrics_seconds:g} s; later steps are left out.")
                return
            if len(rest) > MOST_LINE_BYTES:
                notices.append("The metrics have a line that no trainer writes; the steps from there on are left out.")
                return
    except FileNotFoundError:
        notices.append("There are no metrics, as long as no step is done, or where object storage has no checkpoint.")
        return
    if rest:
        yield rest


def _checkpoints(folder: StoragePath, bounds: Bounds, notices: list[str]) -> list[Head]:
    checkpoints = folder / "checkpoints"
    number = len(storage_of(checkpoints).folders())
    if number > bounds.checkpoints:
        notices.append(f"{number:,} checkpoints are more than {bounds.checkpoints:,}, and are not shown.")
        return []
    try:
        heads = HeadCache(checkpoints).all()
    except TrainingError as error:
        notices.append(f"The checkpoints are not shown: {error}")
        return []
    return sorted(heads, key=lambda head: (head.phase_index, head.step))


def _history(folder: StoragePath, bounds: Bounds, notices: list[str]) -> list[HistoryEntry]:
    paths = storage_of(folder / HISTORY).glob("*.json")
    if len(paths) > bounds.entries:
        notices.append(f"Of {len(paths):,} entries of the history, the newest {bounds.entries:,} are shown.")
    contents = _beginnings(paths[-bounds.entries :], bounds.entry_bytes)
    entries, unreadable = [], 0
    for content in contents:
        try:
            entries.append(HistoryEntry.model_validate_json(content))
        except ValidationError:
            unreadable += 1
    if unreadable:
        notices.append(f"{unreadable:,} entries of the history make no sense, and are left out.")
    return sorted(entries, key=lambda entry: entry.time)


def _beginnings(paths: Sequence[StoragePath], size: int) -> list[bytes]:
    objects = [path for path in paths if isinstance(path, ObjectPath)]
    files = [path for path in paths if isinstance(path, Path)]
    return [content or b"" for content in read_beginnings(objects, size)] + [_beginning(path, size) for path in files]


def _beginning(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        return file.read(size)
