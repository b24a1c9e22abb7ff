"""The file in which a rank says where it is: a fixed layout, mapped into memory, so that a word costs a microsecond.

Two slots are written in turn, each with a checksum of its own: who reads while one is being written, or after its
writer was stopped in the middle of it, finds the other. A third record, of another thread, is the end of a save.
"""

import mmap
import os
import struct
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any, get_args
from zlib import crc32

from pseudoreal_api.wire.reports import Place

_PLACES: tuple[Place, ...] = get_args(Place)
_INDEX = {place: index for index, place in enumerate(_PLACES)}
_SLOT = struct.Struct("<QIIB64sdQQdd")
"""Turn, pid, rank, place, doing, since, step, waits, busy seconds, begin of the save."""
_SAVED = struct.Struct("<d")
_CHECKSUM = struct.Struct("<I")
_SLOT_ROOM, _SAVED_BEGIN, _SIZE = 128, 256, 272
assert _SLOT.size + _CHECKSUM.size <= _SLOT_ROOM


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a rank last said. Moments are of CLOCK_MONOTONIC, which the processes of a machine share."""

    pid: int
    rank: int
    place: Place
    doing: str
    since: float
    """Moment when it came there."""
    step: int
    waits: int
    """That it has left."""
    busy_seconds: float | None
    save_began: float | None
    """Moment. None: no save is under way."""


class StampFile:
    """Of the rank that writes it."""

    def __init__(self, path: Path, pid: int, rank: int) -> None:
        with path.open("wb+") as file:
            # Room that the first word does not find would end the process.
            os.posix_fallocate(file.fileno(), 0, _SIZE)
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._pid, self._rank, self._turn = pid, rank, 0

    def write(
        self, place: Place, doing: str, since: float, step: int, waits: int, busy_seconds: float, save_began: float
    ) -> None:
        """The last two: NaN where there is none."""
        self._turn += 1
        numbers = (since, step, waits, busy_seconds, save_began)
        body = _SLOT.pack(self._turn, self._pid, self._rank, _INDEX[place], doing.encode(), *numbers)
        self._put(self._turn % 2 * _SLOT_ROOM, body)

    def write_saved(self, moment: float) -> None:
        """The save that began before this moment is committed."""
        self._put(_SAVED_BEGIN, _SAVED.pack(moment))

    def _put(self, begin: int, body: bytes) -> None:
        self._map[begin : begin + len(body) + _CHECKSUM.size] = body + _CHECKSUM.pack(crc32(body))


def read_stamp(path: Path) -> Stamp | None:
    """None: it has said nothing yet."""
    content = path.read_bytes()
    found = [slot for slot in (_sound(content, _SLOT, turn * _SLOT_ROOM) for turn in range(2)) if slot]
    if not found:
        return None
    _, pid, rank, place, doing, since, step, waits, busy, began = max(found)
    saved = _sound(content, _SAVED, _SAVED_BEGIN)
    return Stamp(
        pid=pid,
        rank=rank,
        place=_PLACES[place],
        doing=doing.rstrip(b"\0").decode(errors="replace"),
        since=since,
        step=step,
        waits=waits,
        busy_seconds=None if isnan(busy) else busy,
        save_began=None if isnan(began) or (saved and saved[0] >= began) else began,
    )


def _sound(content: bytes, layout: struct.Struct, begin: int) -> tuple[Any, ...] | None:
    """The values there; None when its checksum says that they do not belong together."""
    body = content[begin : begin + layout.size]
    checksum = content[begin + layout.size : begin + layout.size + _CHECKSUM.size]
    is_sound = len(checksum) == _CHECKSUM.size and _CHECKSUM.unpack(checksum)[0] == crc32(body)
    return layout.unpack(body) if is_sound else None
