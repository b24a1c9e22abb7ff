"""The file metrics.jsonl: truncation when an execution resumes, and the copy of its lines in object storage.

Object storage cannot append, so each checkpoint has a part: the file `metrics/STEP/lines.jsonl`, beside `checkpoints/`.
The part has the lines after the previous checkpoint, up to and including STEP. The part is written before the
checkpoint of STEP, so an execution resuming from STEP finds all lines up to STEP.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import structlog

from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.storage.path import ObjectPath, StoragePath
from pseudoreal_trainer.storage.storage import storage_of

METRICS_FILE = "metrics.jsonl"
_FOLDER, _PART = "metrics", "lines.jsonl"
_STEP_FOLDER = re.compile(r"[0-9]{12,20}")
"""Pattern of a part's folder name; folders with other names are ignored."""

_BLOCK_BYTES, MOST_LINE_BYTES = 1 << 20, 1 << 26
"""Number of bytes read at a time in the search for lines; maximum size of a line that this program writes."""
_STEP = re.compile(rb'\{"phase": ?"[-a-z0-9]+", ?"step": ?([0-9]{1,18}),')

log = structlog.get_logger()


def truncate_after(path: Path, step: int) -> None:
    """Remove the lines of steps after `step`: a resumed execution writes these lines again.

    A line cut short by a crash is removed too. Steps increase from line to line, so only the removed lines are read,
    from the end of the file. A single truncate call cuts the file: after a crash, the file has either all lines or
    exactly the kept lines.
    """
    with path.open("ab+") as file:
        end = next((end for line, end in _lines_from_end(file) if _is_kept(line, step)), 0)
        file.truncate(end)
        # A crash may have cut off exactly the line break of the last kept line.
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            file.write(b"\n")


def _lines_from_end(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield each line with its line break and the position after the line, last line first.

    A line longer than `MOST_LINE_BYTES` is yielded as empty bytes: this program cannot have written it.
    """
    end = start = file.seek(0, os.SEEK_END)
    while start > 0:
        first = max(0, start - _BLOCK_BYTES)
        block = os.pread(file.fileno(), start - first, first)
        at = len(block)
        # A line break is also the start of the next line, except at the end of the file.
        while (at := block.rfind(b"\n", 0, at)) >= 0:
            begin = first + at + 1
            if begin < end:
                yield block[at + 1 : end - first] if end <= start else _read(file, begin, end), end
                end = begin
        start = first
    if end > 0:
        yield _read(file, 0, end), end


def _read(file: BinaryIO, begin: int, end: int) -> bytes:
    return os.pread(file.fileno(), end - begin, begin) if end - begin <= MOST_LINE_BYTES else b""


def _is_kept(line: bytes, step: int) -> bool:
    found = _STEP.match(line)
    if found is not None and int(found[1]) > step:
        return False  # from the pattern alone: a restart from scratch may remove a million lines, too many to parse
    try:
        return int(json.loads(line)["step"]) <= step
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


class PersistedMetrics:
    """Copies the lines of metrics.jsonl to object storage, part by part."""

    def __init__(self, folder: ObjectPath, step: int) -> None:
        """Remove the parts of steps after `step`, because this execution trains these steps again.

        `folder` is the job's folder; this execution resumes from `step`.
        """
        self._folder = folder / _FOLDER
        self._lines: list[str] = []
        for part in parts_of_metrics(folder):
            if int(part.name) > step:
                storage_of(part).remove_folder(_PART)

    def add(self, line: str) -> None:
        self._lines.append(line)

    def persist(self, step: int) -> None:
        """Write the lines since the previous part as the part of `step`. If the write fails, the lines go into the next
        part."""
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
        with (folder / METRICS_FILE).open(encoding="utf-8") as lines:
            yield from (line.rstrip("\n") for line in lines)
        return
    parts = parts_of_metrics(folder)
    if not parts:
        raise FileNotFoundError(f"{folder / _FOLDER} has no metrics")
    for part in parts:
        # Not splitlines(): it also splits at characters such as U+2028, which a text may contain.
        yield from storage_of(part / _PART).read().decode().rstrip("\n").split("\n")


def blocks_of_metrics(folder: StoragePath) -> Iterator[bytes]:
    """Yield the content of the lines of `metrics_of`, in blocks: each is read only when the caller asks for it.

    Raises FileNotFoundError if there are no metrics.
    """
    if isinstance(folder, Path):
        with (folder / METRICS_FILE).open("rb") as file:
            yield from iter(lambda: file.read(_BLOCK_BYTES), b"")
        return
    parts = parts_of_metrics(folder)
    if not parts:
        raise FileNotFoundError(f"{folder / _FOLDER} has no metrics")
    for part in parts:
        yield from blocks_of_part(part)


def blocks_of_part(part: StoragePath) -> Iterator[bytes]:
    path = part / _PART
    size, content = storage_of(path).size(), storage_of(path).content()
    for begin in range(0, size, _BLOCK_BYTES):
        block = np.empty(min(_BLOCK_BYTES, size - begin), np.uint8)
        content.read_into(begin, block)
        yield block.tobytes()


def parts_of_metrics(folder: ObjectPath) -> list[StoragePath]:
    """Return the folders of the parts, sorted by step."""
    found = storage_of(folder / _FOLDER).folders()
    return sorted((part for part in found if _STEP_FOLDER.fullmatch(part.name)), key=lambda part: int(part.name))
