"""Ranks that crash: what the C library's last signal leaves in a file, by which a crash is told from a kill.

A SIGKILL, by the kernel for using too much memory or by anybody else, leaves nothing.
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
    """The signal in words: Aborted, Segmentation fault, Bus error, ..."""
    where: str | None
    """The innermost line of Python of the thread that crashed. None: that thread runs no Python."""

    @property
    def is_of_watchdog(self) -> bool:
        """Whether NCCL's watchdog ended the process: a thread of torch that aborts it when a collective takes too
        long."""
        return self.what == "Aborted" and self.where is None


def note_crashes(folder: Path, local_rank: int) -> None:
    """Makes a crash of this process, from now on, leave a file in the folder."""
    # The handler writes to the descriptor, which stays open as long as the process lives.
    faulthandler.enable(_file_of(folder, local_rank).open("wb"))


def read_crashes(folder: Path, local_ranks: int) -> Mapping[int, Crash]:
    """Local rank -> how it crashed, for those that did."""
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
