"""Read the folder of a job, with bounds on everything: bytes of metrics, checkpoints, entries of the history, time."""

import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from pseudoreal_api.quantity import readable_bytes
from pseudoreal_api.resolved.config import PhaseConfig
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
    configs: Sequence[PhaseConfig] = ()
    """Configurations from outside the history, for instance from the spec of a job in a cluster."""
    has_checkpoints: bool = True
    """False for a job in a cluster: the page does not read the job's storage."""


USUAL_BOUNDS = Bounds()


def read_job_files(folder: StoragePath, bounds: Bounds = USUAL_BOUNDS) -> JobFiles:
    """Return what the folder says. Raises TrainingError if it is no folder of a job, or cannot be read."""
    notices: list[str] = []
    try:
        steps = read_steps(_lines(folder, bounds, notices))
        checkpoints = Checkpoints(folder, bounds).read(notices)
        history = History(folder, bounds).read(notices)
    except OSError as error:
        raise cannot_be_read(folder, error) from error
    if not (len(steps) or checkpoints or history):
        raise TrainingError(
            f"{folder} holds neither metrics nor checkpoints of a job; give its work directory, or the URL of the"
            " folder with checkpoints/"
        )
    return JobFiles(str(folder), steps, checkpoints, history, [*notices, *notices_of(steps, history)])


def cannot_be_read(folder: StoragePath, error: OSError) -> TrainingError:
    return TrainingError(f"{folder} cannot be read: {error}")


def notices_of(steps: Steps, history: Sequence[HistoryEntry]) -> list[str]:
    """Return the sentences about what the files lack."""
    notices = []
    if steps.unreadable:
        notices.append(f"{steps.unreadable:,} lines of the metrics make no sense, and are left out.")
    if not history:
        notices.append(
            "This job has no history/, which trainers record from release 0.4 on: times, causes, pods and nodes of"
            " restarts, the configuration of its phases and the memory that was predicted are not known."
        )
    return notices


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


class Checkpoints:
    """Checkpoints of a job. Manifests that were read before are not read again."""

    def __init__(self, folder: StoragePath, bounds: Bounds, *, follows_links: bool = True) -> None:
        """`follows_links`: whether to follow symbolic links in the job's folder."""
        self._folder, self._bounds, self._follows_links = folder / "checkpoints", bounds, follows_links
        self._heads = HeadCache(self._folder, follows_links)

    def read(self, notices: list[str]) -> list[Head]:
        """Return the committed checkpoints, in the order of the phases, then of the steps."""
        if not self._follows_links and is_link(self._folder):
            return []
        number = len(storage_of(self._folder).folders())
        if number > self._bounds.checkpoints:
            notices.append(f"{number:,} checkpoints are more than {self._bounds.checkpoints:,}, and are not shown.")
            return []
        try:
            heads = self._heads.all()
        except TrainingError as error:
            notices.append(f"The checkpoints are not shown: {error}")
            return []
        return sorted(heads, key=lambda head: (head.phase_index, head.step))


class History:
    """Entries of a job's history. Entries that were read before are not read again: they do not change."""

    def __init__(self, folder: StoragePath, bounds: Bounds, *, follows_links: bool = True) -> None:
        """`follows_links`: as for `Checkpoints`."""
        self._folder, self._bounds, self._follows_links = folder / HISTORY, bounds, follows_links
        self._known: dict[str, HistoryEntry | None] = {}
        """Name of a file -> entry; None: the file makes no sense."""

    def read(self, notices: list[str]) -> list[HistoryEntry]:
        """Return the newest entries, oldest first."""
        is_read = self._follows_links or not is_link(self._folder)
        paths = storage_of(self._folder).glob("*.json") if is_read else []
        most = self._bounds.entries
        if len(paths) > most:
            notices.append(f"Of {len(paths):,} entries of the history, the newest {most:,} are shown.")
        newest = {path.name: path for path in paths[-most:]}
        self._known = {name: entry for name, entry in self._known.items() if name in newest}
        new = [path for name, path in newest.items() if name not in self._known]
        contents = _beginnings(new, self._bounds.entry_bytes, follows_links=self._follows_links)
        for path, content in zip(new, contents, strict=True):
            self._known[path.name] = entry_in(content)
        entries = [entry for entry in self._known.values() if entry is not None]
        if unreadable := len(self._known) - len(entries):
            notices.append(f"{unreadable:,} entries of the history make no sense, and are left out.")
        return sorted(entries, key=lambda entry: entry.time)


def entry_in(content: bytes) -> HistoryEntry | None:
    """Return the entry of a file; None if the file makes no sense."""
    try:
        return HistoryEntry.model_validate_json(content)
    except ValidationError:
        return None


def _beginnings(paths: Sequence[StoragePath], size: int, *, follows_links: bool) -> list[bytes]:
    """Return the first bytes of each file; all are objects, or all are files."""
    objects = [path for path in paths if isinstance(path, ObjectPath)]
    files = [path for path in paths if isinstance(path, Path)]
    return [
        *(content or b"" for content in read_beginnings(objects, size)),
        *(beginning_of(path, size, follows_links=follows_links) for path in files),
    ]


def beginning_of(path: Path, size: int, *, follows_links: bool) -> bytes:
    """Return the first bytes of a file; nothing of what is no file, such as a pipe, which nobody may ever write to."""
    with open_file(path, follows_links=follows_links) as file:
        return file.read(size) if file is not None else b""


def is_link(path: StoragePath) -> bool:
    """Return whether `path` is a symbolic link."""
    return isinstance(path, Path) and path.is_symlink()


@contextmanager
def open_file(path: Path, *, follows_links: bool) -> Iterator[BinaryIO | None]:
    """Open a regular file for reading. None for a pipe or a device, and for a symbolic link unless `follows_links`.
    Does not wait for the other end of a pipe. Raises OSError for a folder, and if there is no file."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follows_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if follows_links or error.errno != errno.ELOOP:
            raise
        yield None
        return
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        os.close(descriptor)  # open() would refuse it, and leave it open
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with open(descriptor, "rb", buffering=0) as file:
        yield file if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
