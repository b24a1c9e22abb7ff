"""Jobs in the folders of local runs, below one folder.

A folder is a job's if it has the files of one; the folders in it are not searched. Links are not followed: whoever may
write below the folder would decide what else is read. Of each job, the list reads the newest entry of its history and
the end of its metrics, and reads them again when they have changed.
"""

import hashlib
import os
import shlex
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_api.wire.messages import ProgressReport
from pydantic import JsonValue, ValidationError
from pydantic_core import from_json

from pseudoreal_trainer.report.figures import readable
from pseudoreal_trainer.report.job import jobs_of
from pseudoreal_trainer.report.reading import beginning_of, entry_in, is_link, open_file
from pseudoreal_trainer.report.restarts import is_plausible, utc
from pseudoreal_trainer.runtime.history import HISTORY, HistoryEntry
from pseudoreal_trainer.storage.path import StoragePath, is_object
from pseudoreal_trainer.training.metrics_file import METRICS_FILE
from pseudoreal_trainer.ui.following import FollowedFolder
from pseudoreal_trainer.ui.view import Command, JobView, Labels, Listing, Row

_RECORD, _CHECKPOINTS = "job.json", "checkpoints"
_DEPTH = 4
"""Most folders between the folder that is shown and that of a job."""
_MOST_JOBS, _MOST_FOLDERS = 2000, 20_000
"""Most jobs of the list; most folders that are searched."""
_RECORD_BYTES, _ENTRY_BYTES, _LINE_BYTES = 1 << 20, 1 << 16, 1 << 16
"""Most bytes that the list reads of a job's record, of an entry of its history, and of the end of its metrics."""
_SEARCH_SECONDS = 2.0
"""Least seconds between two searches for jobs."""
_LEAST_PAUSE_SECONDS, _OBJECTS_PAUSE_SECONDS = 0.4, 10.0
"""Least seconds between two reads of a folder on a disk, and in object storage."""
_WHILE_BEHIND_SECONDS = 0.05
_SILENT_SECONDS = 600.0
"""Seconds without a step after which training counts as silent."""


@dataclass(frozen=True)
class _Life:
    """What the files of a job say of its state."""

    state: str
    note: str = ""


class LocalRuns:
    """Source of the jobs below a folder, or of the one job of a folder in object storage."""

    def __init__(self, folder: StoragePath) -> None:
        self._folder = folder
        self._jobs: dict[str, StoragePath] = {}
        """Identifier -> folder, of all jobs that the list has had."""
        self.labels = Labels(f"Jobs in {folder}", "Folder", "Last sign (UTC)", "Read from the folders of the jobs.")

    def listing(self) -> "_Runs | _OneObject":
        if isinstance(self._folder, Path):
            return _Runs(self._folder, self._jobs)
        return _OneObject(self._folder, self._jobs)

    def job(self, id: str) -> "_FollowedRun | None":
        folder = self._jobs.get(id)
        return None if folder is None else _FollowedRun(folder)


class _OneObject:
    """List of the one job in object storage that the command names."""

    def __init__(self, folder: StoragePath, jobs: dict[str, StoragePath]) -> None:
        self._row = Row(_id(str(folder)), folder.name, str(folder), "Unknown")
        jobs[self._row.id] = folder
        self._is_read = False
        self._closed = threading.Event()

    def read(self) -> Listing | None:
        was_read, self._is_read = self._is_read, True
        return None if was_read else Listing([self._row])

    def wait(self) -> None:
        self._closed.wait()

    def close(self) -> None:
        self._closed.set()


@dataclass
class _Known:
    """Row of a job, and the state of the files from which it was made."""

    state: object
    row: Row


class _Runs:
    def __init__(self, folder: Path, jobs: dict[str, StoragePath]) -> None:
        self._folder, self._jobs = folder, jobs
        self._known: dict[Path, _Known] = {}
        self._found: list[Path] = []
        self._notices: list[str] = []
        self._searched = self._took = 0.0
        self._before: Listing | None = None
        self._closed = threading.Event()

    def wait(self) -> None:
        # A search of a slow file system is a small part of the time.
        self._closed.wait(max(_LEAST_PAUSE_SECONDS, 4 * self._took))

    def read(self) -> Listing | None:
        begin = time.monotonic()
        if not self._found or begin - self._searched > _SEARCH_SECONDS:
            self._search()
        rows = [row for folder in self._found if (row := self._row(folder)) is not None]
        listing = Listing(sorted(rows, key=lambda row: row.since, reverse=True), self._notices)
        self._took = time.monotonic() - begin
        if listing == self._before:
            return None
        self._before = listing
        return listing

    def close(self) -> None:
        self._closed.set()

    def _search(self) -> None:
        self._notices = []
        self._found = [*_jobs_below(self._folder, self._notices)]
        self._known = {folder: known for folder, known in self._known.items() if folder in {*self._found}}
        self._jobs |= {_id(str(folder)): folder for folder in self._found}
        self._searched = time.monotonic()

    def _row(self, folder: Path) -> Row | None:
        """Return the row of a job; None if its folder is gone."""
        try:
            state = (_state_of(folder / METRICS_FILE), *_newest_entry(folder), _state_of(folder / _RECORD))
            known = self._known.get(folder)
            if known is None or known.state != state or known.row.state == "Training":
                row = _row_of(folder, self._folder)
                self._known[folder] = known = _Known(state, row)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, OverflowError) as error:  # a file of one job stops no list
            return Row(_id(str(folder)), folder.name, _below(folder, self._folder), "Unreadable", note=str(error))
        return known.row


def _jobs_below(top: Path, notices: list[str]) -> Iterator[Path]:
    """Yield the folders of jobs, level by level."""
    level, searched, found = [top], 0, 0
    for _ in range(_DEPTH + 1):
        below: list[Path] = []
        for folder in level:
            searched += 1
            if searched > _MOST_FOLDERS or found >= _MOST_JOBS:
                notices.append(
                    f"Only {found:,} jobs in {searched - 1:,} folders are listed; give a folder with fewer below it."
                )
                return
            try:
                with os.scandir(folder) as entries:
                    # A link named like a file of a job makes no job: nothing is read through it.
                    names = {
                        entry.name: entry.is_dir(follow_symlinks=False) for entry in entries if not entry.is_symlink()
                    }
            except OSError as error:
                if folder == top:
                    notices.append(f"{top} cannot be read: {error.strerror}")
                continue
            if _is_job(names):
                found += 1
                yield folder
            else:
                below += [folder / name for name, is_folder in names.items() if is_folder and name[:1] != "."]
        level = sorted(below)


def _is_job(names: dict[str, bool]) -> bool:
    """Return whether a folder with these files, and with these folders (True), is a job's."""
    if names.get(METRICS_FILE) is False or names.get(HISTORY) is True:
        return True
    return names.get(_CHECKPOINTS) is True or (names.get(_RECORD) is False and names.get("pods") is True)


def _id(folder: str) -> str:
    # Not the path: it may have any characters, and would stand in the browser's history.
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]


def _below(folder: Path, top: Path) -> str:
    return str(folder.relative_to(top)) if folder != top else str(folder)


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _newest_entry(folder: Path) -> tuple[str | None, int]:
    """Return the name of the newest entry of the history, and the number of entries."""
    if is_link(folder / HISTORY):
        return None, 0
    try:
        names = [name for name in os.listdir(folder / HISTORY) if name.endswith(".json")]
    except (FileNotFoundError, NotADirectoryError):
        return None, 0
    return max(names, default=None), len(names)


def _row_of(folder: Path, top: Path) -> Row:
    report, entry, record = _last_report(folder), _last_entry(folder), _record(folder)
    sign = _last_sign(folder, entry)
    life = _life(entry, record, sign)
    phase = (entry.phase if entry else None) or (report.phase if report else "")
    total = f" of {report.total_steps:,}" if report and report.total_steps else ""
    return Row(
        _id(str(folder)),
        _name(record) or folder.name,
        _below(folder, top),
        life.state,
        phase=phase,
        progress=f"{report.step:,}{total}" if report else "",
        loss=readable(report.loss, "number") if report and report.loss is not None else "",
        since=utc(sign) if sign else "",
        note=life.note,
    )


def _life(entry: HistoryEntry | None, record: JsonValue, sign: float | None) -> _Life:
    """Return the state of a job: from the newest entry of its history, and the time of its last sign."""
    if entry is None and sign is None and record is not None:
        return _Life("Starting")
    if entry is None:
        return _Life("Unknown", "The job has no history, so the page cannot say whether it trains.")
    is_silent = time.time() - (sign or entry.time) > _SILENT_SECONDS
    if entry.event == "Ended":
        if entry.outcome == "Succeeded":
            if entry.stage == "train" and entry.phase == _last_phase(record):
                return _Life("Complete")
            return _silence() if is_silent else _Life("Between phases")
        if entry.outcome == "Yielded":
            return _Life("Stopped", entry.message or "The run was asked to stop.")
        return _Life("Failed", entry.message)
    return _silence() if is_silent else _Life("Training")


def _silence() -> _Life:
    minutes = int(_SILENT_SECONDS // 60)
    return _Life("Silent", f"No step for more than {minutes} minutes; a run that was killed leaves no other sign.")


def _last_sign(folder: Path, entry: HistoryEntry | None) -> float | None:
    metrics = _state_of(folder / METRICS_FILE)
    signs = [*([metrics[2] / 1e9] if metrics else []), *([entry.time] if entry else [])]
    # Whoever writes the files sets their times: those of no training are no signs, and some of them are no dates.
    return max((sign for sign in signs if is_plausible(sign)), default=None)


def _last_report(folder: Path) -> ProgressReport | None:
    """Return the newest whole line of the metrics; None: there is none, or it makes no sense."""
    try:
        with open_file(folder / METRICS_FILE, follows_links=False) as file:
            if file is None:
                return None
            size = os.fstat(file.fileno()).st_size
            end = os.pread(file.fileno(), _LINE_BYTES, max(0, size - _LINE_BYTES))
    except FileNotFoundError:
        return None
    lines = end.split(b"\n")[:-1]
    for line in reversed(lines):
        try:
            return ProgressReport.model_validate_json(line)
        except ValidationError:
            continue
    return None


def _last_entry(folder: Path) -> HistoryEntry | None:
    name, _ = _newest_entry(folder)
    if name is None:
        return None
    try:
        return entry_in(beginning_of(folder / HISTORY / name, _ENTRY_BYTES, follows_links=False))
    except FileNotFoundError:
        return None


def _record(folder: Path) -> JsonValue:
    """Return the record of a local run; None: there is none, as in the folder of a job on a cluster."""
    try:
        record: JsonValue = from_json(beginning_of(folder / _RECORD, _RECORD_BYTES, follows_links=False))
    except (FileNotFoundError, ValueError):
        return None
    return record


def _name(record: JsonValue) -> str | None:
    found = _at(record, "job", "metadata", "name")
    return found if isinstance(found, str) else None


def _last_phase(record: JsonValue) -> JsonValue:
    phases = _at(record, "job", "spec", "phases")
    return _at(phases[-1], "name") if isinstance(phases, list) and phases else None


def _at(value: JsonValue, *names: str) -> JsonValue:
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


class _FollowedRun:
    """Feed of one job."""

    def __init__(self, folder: StoragePath) -> None:
        self._folder, self._files = folder, FollowedFolder(folder)
        self._took = 0.0
        self._before: JobView | None = None
        self._closed = threading.Event()

    def wait(self) -> None:
        least = _LEAST_PAUSE_SECONDS if isinstance(self._folder, Path) else _OBJECTS_PAUSE_SECONDS
        self._closed.wait(_WHILE_BEHIND_SECONDS if self._files.is_behind else max(least, 2 * self._took))

    def read(self) -> JobView | None:
        begin = time.monotonic()
        life = self._life()
        # Last of what may fail: it returns news only once.
        files = self._files.read()
        before = self._before
        if files is not None:
            job = jobs_of([files])[0]
        elif before is None or before.state != life.state:
            assert before is not None, "the first read of a folder returns its files"
            job = before.job
        else:
            return None
        facts = [("State", life.state), *([("Note", life.note)] if life.note else [])]
        commands = _commands(self._folder, life.state)
        self._took = time.monotonic() - begin
        self._before = JobView(job.name, str(self._folder), life.state, job, facts, commands=commands)
        return self._before

    def _life(self) -> _Life:
        if not isinstance(self._folder, Path):
            return _Life("Unknown", "Object storage does not say whether the job trains.")
        entry = _last_entry(self._folder)
        return _life(entry, _record(self._folder), _last_sign(self._folder, entry))

    def close(self) -> None:
        self._closed.set()


def _commands(folder: StoragePath, state: str) -> Sequence[Command]:
    where = shlex.quote(str(folder))
    report = Command("Write the page as one file", f"pseudoreal report {where} -o report.html")
    if is_object(str(folder)):
        return [report, Command("Print all metrics", f"pseudoreal metrics {where}")]
    trains = "It trains; Ctrl-C in its terminal saves a checkpoint first." if state == "Training" else ""
    done = "It is complete; a later end of its last phase in the file lets it go on." if state == "Complete" else ""
    return [
        Command(
            "Go on from the newest checkpoint (JOB.yaml: the file of the run)",
            f"pseudoreal run JOB.yaml --workdir {where} --resume",
            trains or done,
        ),
        report,
        Command("Remove the run, with its checkpoints", f"rm -r {where}", trains),
    ]
