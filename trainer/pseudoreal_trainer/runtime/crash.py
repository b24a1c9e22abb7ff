"""Crashes of ranks, distinguished from kills: faulthandler writes a file on a fatal signal.

A SIGKILL, from the kernel's OOM killer or anyone else, leaves no file.
"""

import faulthandler
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_HEAD = "Fatal Python error: "
_CRASHING = "Current thread "
_FRAME = "  File "


@dataclass(frozen=True)
class Crash:
    what: str
    """Name of the fatal signal as faulthandler writes it: Aborted, Segmentation fault, Bus error, ..."""
    where: str | None
    """Innermost Python line of the crashed thread; None for a thread without Python."""

    @property
    def is_of_watchdog(self) -> bool:
        """Whether NCCL's watchdog ended the process. The watchdog is a thread of torch; it aborts the process after a
        collective times out."""
        return self.what == "Aborted" and self.where is None


def note_crashes(folder: Path, local_rank: int) -> None:
    """Enable faulthandler for this process; a crash then leaves a file in the folder."""
    # faulthandler keeps the file descriptor, so the file must stay open for the life of the process.
    faulthandler.enable(_file_of(folder, local_rank).open("wb"))


def read_crashes(folder: Path, local_ranks: int) -> Mapping[int, Crash]:
    """Return the crashes by local rank."""
    found = {rank: _read(_file_of(folder, rank)) for rank in range(local_ranks)}
    return {rank: crash for rank, crash in found.items() if crash is not None}


def _file_of(folder: Path, local_rank: int) -> Path:
    return folder / f"{local_rank}.crash"


def _read(path: Path) -> Crash | None:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    heads = [line.removeprefix(_HEAD) for line in lines if line.startswith(_HEAD)]
    if not heads:
        return None
    begin = next((index for index, line in enumerate(lines) if line.startswith(_CRASHING)), None)
    if begin is None:
        return Crash(heads[0], None)
    return Crash(heads[0], next((line.strip() for line in lines[begin:] if line.startswith(_FRAME)), "no frame"))
