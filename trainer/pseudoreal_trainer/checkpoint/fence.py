"""Keeps an attempt that was replaced from committing what its successor does not expect."""

from dataclasses import dataclass
from pathlib import Path

from pseudoreal_trainer.checkpoint.durable import write_atomically
from pseudoreal_trainer.errors import TrainingError


@dataclass(frozen=True)
class Fence:
    work_directory: Path
    attempt: int

    def claim(self) -> None:
        """Raises TrainingError when a later attempt has already begun, or the volume cannot be written to."""
        self.check()
        try:
            self.work_directory.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, str(self.attempt))
        except OSError as error:
            raise TrainingError(
                f"the work directory {self.work_directory} cannot be written to: {error}; every pod of the job needs a"
                " volume that it may write to, with room for checkpoints"
            ) from error

    def check(self) -> None:
        """Raises TrainingError when a later attempt has begun."""
        newest = int(self._path.read_text()) if self._path.exists() else self.attempt
        if newest > self.attempt:
            raise TrainingError(f"attempt {self.attempt} was replaced by attempt {newest}; it stops without saving")

    @property
    def _path(self) -> Path:
        return self.work_directory / "attempt"
