"""Small files for communication between the processes of a running pod; the files about the end of ranks are in
termination.py."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_api.base import ApiModel
from pseudoreal_api.wire.layout import ChosenLayout
from pseudoreal_api.wire.messages import InPlace, ProgressReport
from pseudoreal_api.wire.reports import Membership, SavedCheckpoint

from pseudoreal_trainer.runtime.termination import OUTCOME_DIRECTORY

MEMBERSHIP = "PSEUDOREAL_MEMBERSHIP"
"""Environment variable of a rank: number of the restart in place with which the current membership of its pod started.

0 or unset: the initial membership, in which worker N is pod N.
"""

_MEMORY = Path("/dev/shm")
_HEARTBEAT = ".heartbeat"
_OF_RANKS = "[0-9]*.*"
"""Pattern of the ranks' file names; each name starts with the local rank."""


class _Committed(ApiModel):
    name: str
    step: int
    moment: float
    """Time of the commit, in seconds of CLOCK_MONOTONIC."""


@dataclass(frozen=True)
class PodFolder:
    path: Path

    def heartbeat(self, local_rank: int) -> Path:
        """Return the path of a rank's heartbeat file."""
        return self.path / f"{local_rank}{_HEARTBEAT}"

    def heartbeats(self) -> list[Path]:
        """Return the heartbeat files of the started ranks."""
        return sorted(self.path.glob(f"*{_HEARTBEAT}"))

    def has_ranks(self) -> bool:
        """Return whether a rank has started."""
        return any(self.path.glob(_OF_RANKS))

    def remove_rank_files(self, why: InPlace) -> None:
        """Remove the files of the ended ranks, then record a restart in place. Call before the restart."""
        # Remove first, record second: after the record, rank files show that the ranks have started again.
        for path in self.path.glob(_OF_RANKS):
            path.unlink(missing_ok=True)
        self._replace("in-place", why.to_json())

    def in_place(self) -> InPlace | None:
        """Return the number of restarts in place and the reason of the newest; None before the first. A restart counts
        even while it waits for the other pods."""
        content = self._content("in-place")
        return None if content is None else InPlace.model_validate_json(content)

    def write_restarts_elsewhere(self, restarts: int) -> None:
        self._replace("restarts-elsewhere", str(restarts))

    def restarts_elsewhere(self) -> int:
        """Return the largest number of restarts in place of any pod, according to the operator; 0 until the operator
        has reported a number."""
        return int(self._content("restarts-elsewhere") or 0)

    def write_membership(self, membership: Membership) -> None:
        self._replace("membership", membership.to_json())

    def membership(self) -> Membership | None:
        """Return the operator's newest assignment of workers to pods; None: worker N is pod N."""
        content = self._content("membership")
        return None if content is None else Membership.model_validate_json(content)

    def write_progress(self, report: ProgressReport) -> None:
        self._replace("progress", report.model_dump_json())

    def progress(self) -> ProgressReport | None:
        content = self._content("progress")
        return None if content is None else ProgressReport.model_validate_json(content)

    def write_checkpoint(self, name: str, step: int) -> None:
        """Record a checkpoint committed just now."""
        self._replace("checkpoint", _Committed(name=name, step=step, moment=time.monotonic()).to_json())

    def checkpoint(self) -> SavedCheckpoint | None:
        """Return the newest recorded checkpoint; None if there is none."""
        content = self._content("checkpoint")
        if content is None:
            return None
        found = _Committed.model_validate_json(content)
        return SavedCheckpoint(name=found.name, step=found.step, seconds=time.monotonic() - found.moment)

    def write_layout(self, layout: ChosenLayout) -> None:
        self._replace("layout", layout.to_json())

    def layout(self) -> ChosenLayout | None:
        """Return the automatically chosen layout of the phase; None if the job specifies the layout."""
        content = self._content("layout")
        return None if content is None else ChosenLayout.model_validate_json(content)

    def ask_to_finish(self) -> None:
        self._finish.touch()

    def is_asked_to_finish(self) -> bool:
        """Return whether the operator has asked the phase to save a checkpoint and end."""
        return self._finish.exists()

    @property
    def _finish(self) -> Path:
        return self.path / "finish"

    def _replace(self, name: str, text: str) -> None:
        """Write a file atomically: another process may be reading it."""
        temporary = self.path / f"{name}.tmp"
        # If the volume is full, the content is lost and the training continues.
        with suppress(OSError):
            temporary.write_text(text, encoding="utf-8")
            temporary.rename(self.path / name)

    def _content(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None


def pod_folder() -> PodFolder | None:
    """Return the folder of this process's pod; None if the process runs by itself."""
    return PodFolder(Path(os.environ[OUTCOME_DIRECTORY])) if OUTCOME_DIRECTORY in os.environ else None


def memory_directory() -> str | None:
    """Return a tmpfs folder for constantly written files; None if there is none.

    On a disk, writing to a mapped file blocks while the kernel writes its pages back.
    """
    return str(_MEMORY) if os.access(_MEMORY, os.W_OK) else None


def membership_of_ranks() -> int:
    """Return the number of the restart in place with which the pod's current membership started; 0: the initial
    membership."""
    return int(os.environ.get(MEMBERSHIP, "0"))
