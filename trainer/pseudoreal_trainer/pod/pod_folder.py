"""Small files through which the processes of a pod speak to each other while they run, beside those of outcome.py."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_api.base import ApiModel
from pseudoreal_api.wire.layout import ChosenLayout
from pseudoreal_api.wire.messages import InPlace, ProgressReport
from pseudoreal_api.wire.reports import Membership, SavedCheckpoint

from pseudoreal_trainer.pod.outcome import OUTCOME_DIRECTORY

MEMBERSHIP = "PSEUDOREAL_MEMBERSHIP"
"""Environment variable of a rank: the restart in place with which the membership of its pod began. Not set: each worker
is the pod of its number."""

_MEMORY = Path("/dev/shm")
_HEARTBEAT = ".heartbeat"
_OF_RANKS = "[0-9]*.*"
"""Names of the files that ranks leave, beginning with their number in the pod."""


class _Committed(ApiModel):
    name: str
    step: int
    moment: float
    """Moment of the commit, in seconds of CLOCK_MONOTONIC."""


@dataclass(frozen=True)
class PodFolder:
    path: Path

    def heartbeat(self, local_rank: int) -> Path:
        """The file of a rank's heartbeat."""
        return self.path / f"{local_rank}{_HEARTBEAT}"

    def heartbeats(self) -> list[Path]:
        """Files of the ranks that have begun."""
        return sorted(self.path.glob(f"*{_HEARTBEAT}"))

    def has_ranks(self) -> bool:
        """Whether a rank has begun."""
        return any(self.path.glob(_OF_RANKS))

    def make_room(self, why: InPlace) -> None:
        """Removes what ranks left that have ended, for a restart in place."""
        # Before the restart is noted: it has begun when there are ranks.
        for path in self.path.glob(_OF_RANKS):
            path.unlink(missing_ok=True)
        self._replace("in-place", why.to_json())

    def in_place(self) -> InPlace | None:
        """The restarts in place, with one that waits for the other pods; None where there were none."""
        content = self._content("in-place")
        return None if content is None else InPlace.model_validate_json(content)

    def leave_restarts_elsewhere(self, restarts: int) -> None:
        self._replace("restarts-elsewhere", str(restarts))

    def restarts_elsewhere(self) -> int:
        """Restarts in place of the pod that has begun the most, as far as the operator has said so."""
        return int(self._content("restarts-elsewhere") or 0)

    def leave_membership(self, membership: Membership) -> None:
        self._replace("membership", membership.to_json())

    def membership(self) -> Membership | None:
        """Which pods are the workers, as the operator has said it last; None: those of their numbers."""
        content = self._content("membership")
        return None if content is None else Membership.model_validate_json(content)

    def leave_progress(self, report: ProgressReport) -> None:
        self._replace("progress", report.model_dump_json())

    def progress(self) -> ProgressReport | None:
        content = self._content("progress")
        return None if content is None else ProgressReport.model_validate_json(content)

    def leave_checkpoint(self, name: str, step: int) -> None:
        """Notes a checkpoint that was committed just now."""
        self._replace("checkpoint", _Committed(name=name, step=step, moment=time.monotonic()).to_json())

    def checkpoint(self) -> SavedCheckpoint | None:
        """The newest checkpoint that was noted; None where there is none."""
        content = self._content("checkpoint")
        if content is None:
            return None
        found = _Committed.model_validate_json(content)
        return SavedCheckpoint(name=found.name, step=found.step, seconds=time.monotonic() - found.moment)

    def leave_layout(self, layout: ChosenLayout) -> None:
        self._replace("layout", layout.to_json())

    def layout(self) -> ChosenLayout | None:
        """The layout that was chosen for the phase; None where the job says it."""
        content = self._content("layout")
        return None if content is None else ChosenLayout.model_validate_json(content)

    def ask_to_finish(self) -> None:
        self._finish.touch()

    def is_asked_to_finish(self) -> bool:
        """Whether the phase is to end now, through a checkpoint."""
        return self._finish.exists()

    @property
    def _finish(self) -> Path:
        return self.path / "finish"

    def _replace(self, name: str, text: str) -> None:
        """Writes a file all or not at all: another process reads it meanwhile."""
        temporary = self.path / f"{name}.tmp"
        # Training goes on when there is no room for what it reports on its way.
        with suppress(OSError):
            temporary.write_text(text)
            temporary.rename(self.path / name)

    def _content(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None


def pod_folder() -> PodFolder | None:
    """The folder of the pod that this process belongs to; None when it runs by itself."""
    return PodFolder(Path(os.environ[OUTCOME_DIRECTORY])) if OUTCOME_DIRECTORY in os.environ else None


def memory_directory() -> str | None:
    """A folder in memory for files that are written all the time: a mapped file on a disk makes its writer wait while
    the system saves it. None: there is no such place."""
    return str(_MEMORY) if os.access(_MEMORY, os.W_OK) else None


def membership_of_ranks() -> int:
    """Number of the restart in place with which the membership of this process's pod began."""
    return int(os.environ.get(MEMBERSHIP, "0"))
