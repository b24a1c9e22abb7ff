"""Keeps an execution that was replaced from committing what its successor does not expect."""

from dataclasses import dataclass

from pseudoreal_trainer.checkpoint.storage.path import StoragePath
from pseudoreal_trainer.checkpoint.storage.storage import storage_of
from pseudoreal_trainer.errors import TrainingError


@dataclass(frozen=True)
class Fence:
    work_directory: StoragePath
    execution: int

    def claim(self) -> None:
        """Raises TrainingError when a later execution has already begun, or the storage cannot be written to."""
        self.check()
        try:
            storage_of(self.work_directory).make_folder()
            storage_of(self._path).replace(str(self.execution))
        except OSError as error:
            raise TrainingError(
                f"the work directory {self.work_directory} cannot be written to: {error}; every pod of the job needs a"
                " volume that it may write to, with room for checkpoints"
            ) from error

    def check(self) -> None:
        """Raises TrainingError when a later execution has begun."""
        newest = self._newest()
        if newest > self.execution:
            raise TrainingError(
                f"execution {self.execution} was replaced by execution {newest}; it stops without saving"
            )

    def _newest(self) -> int:
        try:
            return int(storage_of(self._path).read())
        except FileNotFoundError:
            return self.execution

    @property
    def _path(self) -> StoragePath:
        return self.work_directory / "execution"
