"""What the processes of a pod tell each other while they run, through small files beside those of outcome.py."""

import os
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_trainer.outcome import OUTCOME_DIRECTORY

_MEMORY = Path("/dev/shm")
_STAMPS = ".stamps"


@dataclass(frozen=True)
class PodFolder:
    path: Path

    def stamps(self, local_rank: int) -> Path:
        """The file of a rank."""
        return self.path / f"{local_rank}{_STAMPS}"

    def all_stamps(self) -> list[Path]:
        """Of the ranks that have begun."""
        return sorted(self.path.glob(f"*{_STAMPS}"))


def pod_folder() -> PodFolder | None:
    """Of the pod that this process belongs to; None when it runs by itself."""
    return PodFolder(Path(os.environ[OUTCOME_DIRECTORY])) if OUTCOME_DIRECTORY in os.environ else None


def memory_directory() -> str | None:
    """For files that are written all the time: a mapped file on a disk makes its writer wait while the system saves it.
    None: there is no such place."""
    return str(_MEMORY) if os.access(_MEMORY, os.W_OK) else None
