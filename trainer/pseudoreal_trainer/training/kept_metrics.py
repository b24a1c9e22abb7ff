"""Persisted metrics: the lines of metrics.jsonl in object storage.

Object storage cannot append, so each checkpoint gets a part: `metrics/STEP/lines.jsonl`, beside `checkpoints/`, has the
lines after the previous checkpoint, up to and including STEP. The part is written before the checkpoint of STEP, so an
execution resuming from STEP finds all lines up to STEP.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import structlog

from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.storage.path import ObjectPath, StoragePath
from pseudoreal_trainer.storage.storage import storage_of

METRICS_FILE = "metrics.jsonl"
_FOLDER, _PART = "metrics", "lines.jsonl"
_STEP = re.compile(r"[0-9]{12,20}")
"""Pattern of a part's folder name; folders with other names are ignored."""

log = structlog.get_logger()


class KeptMetrics:
    def __init__(self, folder: ObjectPath, step: int) -> None:
        """Remove the parts of steps after `step`: this execution trains these steps again.

        `folder` is the job's folder; this execution resumes from `step`.
        """
        self._folder = folder / _FOLDER
        self._lines: list[str] = []
        for part in _parts(folder):
            if int(part.name) > step:
                storage_of(part).remove_folder(_PART)

    def add(self, line: str) -> None:
        self._lines.append(line)

    def keep(self, step: int) -> None:
        """Write the lines up to `step` as a part. If the write fails, the lines stay and go into the next part."""
        if not self._lines:
            return
        try:
            storage_of(self._folder / f"{step:012d}" / _PART).replace("".join(line + "\n" for line in self._lines))
        except (OSError, TrainingError) as error:
            log.warning("metrics_not_kept", step=step, error=str(error))
        else:
            self._lines.clear()


def metrics_of(folder: StoragePath) -> Iterator[str]:
    """Yield the lines of a job's metrics, from metrics.jsonl in the work directory or from the parts in object storage.

    Raises FileNotFoundError if there are no metrics.
    """
    if isinstance(folder, Path):
        with (folder / METRICS_FILE).open() as lines:
            yield from (line.rstrip("\n") for line in lines)
        return
    parts = _parts(folder)
    if not parts:
        raise FileNotFoundError(f"{folder / _FOLDER} has no metrics")
    for part in parts:
        # Not splitlines(): it also splits at characters such as U+2028, which a text may contain.
        yield from storage_of(part / _PART).read().decode().rstrip("\n").split("\n")


def _parts(folder: ObjectPath) -> list[StoragePath]:
    """Return the folders of the parts, sorted by step."""
    found = storage_of(folder / _FOLDER).folders()
    return sorted((part for part in found if _STEP.fullmatch(part.name)), key=lambda part: int(part.name))
