"""File of a heartbeat: a fixed layout, mapped into memory, so that writing a record costs a microsecond or two.

Two copies of the record are written in turn, each with its own checksum. If one copy is being written, or its writer
was stopped in the middle, a reader finds the other copy. The end of a save is stored apart, as another thread writes
it.
"""

import mmap
import os
import struct
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any, get_args
from zlib import crc32

from pseudoreal_api.wire.reports import Activity

_ACTIVITIES: tuple[Activity, ...] = get_args(Activity)
_INDEX = {activity: index for index, activity in enumerate(_ACTIVITIES)}
_RECORD = struct.Struct("<QIIB64sdQQdd")
"""Layout of a record: number, pid, rank, activity, doing, since, step, waits, busy seconds, start of the save."""
_SAVED = struct.Struct("<d")
_CHECKSUM = struct.Struct("<I")
_RECORD_BYTES, _SAVED_BEGIN, _FILE_BYTES = 128, 256, 272
assert _RECORD.size + _CHECKSUM.size <= _RECORD_BYTES


@dataclass(frozen=True, slots=True)
class HeartbeatRecord:
    """Newest record of a rank. Times are seconds of CLOCK_MONOTONIC, which the processes of a machine share."""

    pid: int
    rank: int
    activity: Activity
    doing: str
    since: float
    """Time since which `activity` and `doing` hold."""
    step: int
    """Training steps done since the job's start."""
    waits: int
    """Number of waits that have ended since the process started."""
    busy_seconds: float | None
    """Mean seconds of the newest steps without their waits; None: no step is done."""
    save_began: float | None
    """Time at which the save in progress started; None: no save is in progress."""


class HeartbeatFile:
    """Writer of the file. One thread calls `write`, and one `write_saved`."""

    def __init__(self, path: Path, pid: int, rank: int) -> None:
        with path.open("wb+") as file:
            # Without memory for a page of the mapping, a write to the page would end the process (SIGBUS).
            os.posix_fallocate(file.fileno(), 0, _FILE_BYTES)
            self._map = mmap.mmap(file.fileno(), _FILE_BYTES)
        self._pid, self._rank, self._number = pid, rank, 0

    def write(
        self,
        activity: Activity,
        doing: str,
        since: float,
        step: int,
        waits: int,
        busy_seconds: float,
        save_began: float,
    ) -> None:
        """Write a record. `doing`: cut off after 64 bytes. `busy_seconds`, `save_began`: NaN for none."""
        self._number += 1
        numbers = (since, step, waits, busy_seconds, save_began)
        body = _RECORD.pack(self._number, self._pid, self._rank, _INDEX[activity], doing.encode(), *numbers)
        self._put(self._number % 2 * _RECORD_BYTES, body)

    def write_saved(self, moment: float) -> None:
        """Record that the save which started before this moment is committed."""
        self._put(_SAVED_BEGIN, _SAVED.pack(moment))

    def _put(self, begin: int, body: bytes) -> None:
        self._map[begin : begin + len(body) + _CHECKSUM.size] = body + _CHECKSUM.pack(crc32(body))


def read_heartbeat(path: Path) -> HeartbeatRecord | None:
    """Return the newest record; None: nothing is written yet, or the file is gone. Any process may call this at any
    time."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    found = [record for record in (_sound(content, _RECORD, copy * _RECORD_BYTES) for copy in range(2)) if record]
    if not found:
        return None
    _, pid, rank, activity, doing, since, step, waits, busy, began = max(found)
    saved = _sound(content, _SAVED, _SAVED_BEGIN)
    return HeartbeatRecord(
        pid=pid,
        rank=rank,
        activity=_ACTIVITIES[activity],
        doing=doing.rstrip(b"\0").decode(errors="replace"),
        since=since,
        step=step,
        waits=waits,
        busy_seconds=None if isnan(busy) else busy,
        save_began=None if isnan(began) or (saved and saved[0] >= began) else began,
    )


def _sound(content: bytes, layout: struct.Struct, begin: int) -> tuple[Any, ...] | None:
    """Return the values at `begin`; None if their checksum does not match."""
    body = content[begin : begin + layout.size]
    checksum = content[begin + layout.size : begin + layout.size + _CHECKSUM.size]
    is_sound = len(checksum) == _CHECKSUM.size and _CHECKSUM.unpack(checksum)[0] == crc32(body)
    return layout.unpack(body) if is_sound else None
