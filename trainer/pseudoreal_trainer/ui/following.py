"""Read the folder of a job again and again: of the metrics, only what was appended since.

Each call of `read` has a bound on its bytes, so a long job appears piece by piece. A job that restarts from a
checkpoint cuts its metrics, and writes the same steps again; then the metrics are read from the start.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from pseudoreal_api.quantity import readable_bytes

from pseudoreal_trainer.report.reading import (
    USUAL_BOUNDS,
    Bounds,
    Checkpoints,
    History,
    JobFiles,
    cannot_be_read,
    notices_of,
    open_file,
)
from pseudoreal_trainer.report.steps import StepCollector
from pseudoreal_trainer.storage.path import ObjectPath, StoragePath
from pseudoreal_trainer.training.metrics_file import METRICS_FILE, MOST_LINE_BYTES, blocks_of_part, parts_of_metrics

REFRESH_BYTES = 1 << 24
"""Most bytes of metrics that one call of `read` takes."""
_COMPARED_BYTES = 512
"""Bytes before the place at which reading goes on that are compared: other bytes mean that the file was cut."""


class FollowedFolder:
    """Folder of a job on a disk or in object storage."""

    def __init__(self, folder: StoragePath, bounds: Bounds = USUAL_BOUNDS, refresh_bytes: int = REFRESH_BYTES) -> None:
        self._folder, self._bounds = folder, bounds
        self._metrics = _metrics_of(folder, refresh_bytes)
        self._checkpoints = Checkpoints(folder, bounds, follows_links=False)
        self._history = History(folder, bounds, follows_links=False)
        self._before: object = None
        self._has_failed = False
        """Whether the last `read` raised. The next one then does not return None, because the failed one may have taken
        new metrics."""

    @property
    def is_behind(self) -> bool:
        """Whether the next `read` goes on with metrics that are there already."""
        return self._metrics.is_behind

    def read(self) -> JobFiles | None:
        """Return what the folder says now; None if nothing has changed. Raises TrainingError if it cannot be read."""
        notices: list[str] = []
        had_failed, self._has_failed = self._has_failed, True
        try:
            is_new = self._metrics.read(self._bounds.metrics_bytes) or had_failed
            checkpoints, history = self._checkpoints.read(notices), self._history.read(notices)
        except OSError as error:
            raise cannot_be_read(self._folder, error) from error
        self._has_failed = False
        notices += self._metrics.notices(self._bounds.metrics_bytes)
        # A comparison of two lists is quick: what was read before is the same object.
        state = (checkpoints, history, notices)
        if not is_new and state == self._before:
            return None
        self._before = state
        steps = self._metrics.collector.steps()
        return JobFiles(str(self._folder), steps, checkpoints, history, [*notices, *notices_of(steps, history)])


class _Metrics(Protocol):
    collector: StepCollector
    is_behind: bool

    def read(self, most: int) -> bool:
        """Take new lines, of the first `most` bytes of all; return whether anything is new."""
        ...

    def notices(self, most: int) -> list[str]: ...


def _metrics_of(folder: StoragePath, refresh_bytes: int) -> _Metrics:
    if isinstance(folder, ObjectPath):
        return _MetricsObjects(folder, refresh_bytes)
    return _MetricsFile(folder / METRICS_FILE, refresh_bytes)


class _MetricsFile:
    def __init__(self, path: Path, refresh_bytes: int) -> None:
        self._path, self._refresh_bytes = path, refresh_bytes
        self._is_there = False
        self._start_over()

    def _start_over(self) -> None:
        self.collector = StepCollector()
        self.is_behind = False
        self._inode: int | None = None
        self._offset = 0
        """Bytes that were taken: whole lines."""
        self._last = b""
        """The last bytes before `_offset`."""
        self._is_cut_off = False

    def read(self, most: int) -> bool:
        try:
            with open_file(self._path, follows_links=False) as file:
                return file is not None and self._read(file.fileno(), most)
        except FileNotFoundError:
            was_there, self._is_there = self._is_there, False
            if was_there:
                self._start_over()
            return was_there

    def _read(self, descriptor: int, most: int) -> bool:
        found = os.fstat(descriptor)
        is_new, self._is_there = not self._is_there, True
        if self._inode != found.st_ino or not self._goes_on(descriptor):
            is_new = is_new or self._offset > 0
            self._start_over()
            self._inode = found.st_ino
        wanted = min(found.st_size, most) - self._offset
        if wanted <= 0 or self._is_cut_off:
            self.is_behind = False
            return is_new
        block = os.pread(descriptor, min(wanted, self._refresh_bytes), self._offset)
        end = block.rfind(b"\n") + 1
        self._is_cut_off = not end and len(block) >= min(self._refresh_bytes, MOST_LINE_BYTES)
        for line in block[:end].split(b"\n")[:-1]:
            self.collector.add(line)
        if end:
            self._offset += end
            self._last = (self._last + block[:end])[-_COMPARED_BYTES:]
        self.is_behind = bool(end) and self._offset < min(found.st_size, most) and wanted > self._refresh_bytes
        return is_new or bool(end)

    def _goes_on(self, descriptor: int) -> bool:
        """Return whether the file still has the lines that were read."""
        return os.pread(descriptor, len(self._last), self._offset - len(self._last)) == self._last

    def notices(self, most: int) -> list[str]:
        if not self._is_there:
            return ["There are no metrics, as long as no step is done."]
        notices = []
        if self.is_behind:
            notices.append("The metrics are still being read; the steps so far are shown.")
        if self._offset >= most:
            notices.append(f"Only the first {readable_bytes(most)} of the metrics are read.")
        if self._is_cut_off:
            notices.append("The metrics have a line that no trainer writes; the steps from there on are left out.")
        return notices


class _MetricsObjects:
    """Parts of the metrics in object storage: one for each checkpoint, complete from the moment that it is there."""

    def __init__(self, folder: ObjectPath, refresh_bytes: int) -> None:
        self._folder, self._refresh_bytes = folder, refresh_bytes
        self._start_over()

    def _start_over(self) -> None:
        self.collector = StepCollector()
        self.is_behind = False
        self._parts: list[str] = []
        self._bytes = 0

    def read(self, most: int) -> bool:
        parts = parts_of_metrics(self._folder)
        names = [part.name for part in parts]
        is_new = False
        if names[: len(self._parts)] != self._parts:
            is_new = True
            self._start_over()
        before = self._bytes
        for part in parts[len(self._parts) :]:
            self.is_behind = self._bytes - before >= self._refresh_bytes
            if self.is_behind or self._bytes >= most:
                break
            for line in self._lines(part, most):
                self.collector.add(line)
            self._parts.append(part.name)
        return is_new or self._bytes > before

    def _lines(self, part: StoragePath, most: int) -> Iterator[bytes]:
        rest = b""
        for block in blocks_of_part(part):
            self._bytes += len(block)
            *lines, rest = (rest + block).split(b"\n")
            yield from lines
            if len(rest) > MOST_LINE_BYTES or self._bytes >= most:
                return
        if rest:
            yield rest

    def notices(self, most: int) -> list[str]:
        if not self._parts:
            return ["There are no metrics, as long as object storage has no checkpoint."]
        notices = ["The metrics are those up to the newest checkpoint in object storage."]
        if self.is_behind:
            notices.append("The metrics are still being read; the steps so far are shown.")
        if self._bytes >= most:
            notices.append(f"Only the first {readable_bytes(most)} of the metrics are read.")
        return notices
