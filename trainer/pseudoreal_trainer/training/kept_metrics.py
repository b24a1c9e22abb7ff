"""The lines of metrics.jsonl in object storage, which cannot append: a part with each checkpoint.

`metrics/STEP/lines.jsonl`, beside `checkpoints/`, has the lines from the checkpoint before through STEP. It is written
before the checkpoint of STEP is, so whoever goes on from there finds all lines up to there.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import structlog

from pseudoreal_trainer.checkpoint.storage.path import ObjectPath, StoragePath
from pseudoreal_trainer.checkpoint.storage.storage import storage_of
from pseudoreal_trainer.errors import TrainingError

METRICS_FILE = "metrics.jsonl"
_FOLDER, _PART = "metrics", "lines.jsonl"
_STEP = re.compile(r"[0-9]{12,20}")
"""Name of a part's folder; others are not ours."""

log = structlog.get_logger()


class KeptMetrics:
    def __init__(self, folder: ObjectPath, step: int) -> None:
        """`folder`: that of the job. Parts of steps behind `step`, where this execution begins, are removed, as those
        steps are made anew."""
        self._folder = folder / _FOLDER
        self._lines: list[str] = []
        for part in _parts(folder):
            if int(part.name) > step:
                storage_of(part).remove_folder(_PART)

    def add(self, line: str) -> None:
        self._lines.append(line)

    def keep(self, step: int) -> None:
        """Writes the lines through `step`. What cannot be written now is part of the next."""
        if not self._lines:
            return
        try:
            storage_of(self._folder / f"{step:012d}" / _PART).replace("".join(line + "\n" for line in self._lines))
        except (OSError, TrainingError) as error:
            log.warning("metrics_not_kept", step=step, error=str(error))
        else:
            self._lines.clear()


def metrics_of(folder: StoragePath) -> Iterator[str]:
    """The lines of a job's metrics: of metrics.jsonl in its work directory, or of the parts in object storage. Raises
    FileNotFoundError where there are none."""
    if isinstance(folder, Path):
        with (folder / METRICS_FILE).open() as lines:
            yield from (line.rstrip("\n") for line in lines)
        return
    parts = _parts(folder)
    if not parts:
        raise FileNotFoundError(f"{folder / _FOLDER} has no metrics")
    for part in parts:
        # Not splitlines, which would cut lines at further characters that a text may have.
        yield from storage_of(part / _PART).read().decode().rstrip("\n").split("\n")


def _parts(folder: ObjectPath) -> list[StoragePath]:
    """The folders of the parts, in the order of their steps."""
    found = storage_of(folder / _FOLDER).folders()
    return sorted((part for part in found if _STEP.fullmatch(part.name)), key=lambda part: int(part.name))
