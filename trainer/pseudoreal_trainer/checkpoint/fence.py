"""Keeps ranks that were replaced from committing what their successors do not expect."""

from dataclasses import dataclass

from pseudoreal_trainer.checkpoint.storage.path import StoragePath
from pseudoreal_trainer.checkpoint.storage.storage import storage_of
from pseudoreal_trainer.errors import TrainingError


@dataclass(frozen=True)
class Fence:
    """What ranks of an execution have before a commit, with the number of the restart in place with which a spare pod
    last took a place among them: the pod that had it may live on where nobody can end it. Restarts by which no pod was
    replaced need no number: no rank from before them lives."""

    work_directory: StoragePath
    execution: int
    membership: int = 0

    def claim(self) -> None:
        """Raises TrainingError when a later execution or membership has already begun, or the storage cannot be written
        to."""
        self.check()
        try:
            storage_of(self.work_directory).make_folder()
            storage_of(self._execution_file).replace(str(self.execution))
            # Two files, as trainers of earlier releases read a number in the first. Whoever dies between the two has
            # written no checkpoint yet, and each of them alone only grows.
            if self.membership:
                storage_of(self._membership_file).replace(f"{self.execution}.{self.membership}")
        except OSError as error:
            raise TrainingError(
                f"the work directory {self.work_directory} cannot be written to: {error}; every pod of the job needs a"
                " volume that it may write to, with room for checkpoints"
            ) from error

    def check(self) -> None:
        """Raises TrainingError when a later execution has begun, or a spare pod has taken a place in this one since."""
        newest = int(_text(self._execution_file) or self.execution)
        if newest > self.execution:
            raise TrainingError(
                f"execution {self.execution} was replaced by execution {newest}; it stops without saving"
            )
        execution, _, membership = (_text(self._membership_file) or "0.0").partition(".")
        if int(execution) == self.execution and int(membership) > self.membership:
            raise TrainingError(
                f"a spare pod took a place in execution {self.execution} with restart {membership}, and these ranks are"
                " from before; they stop without saving"
            )

    @property
    def _execution_file(self) -> StoragePath:
        return self.work_directory / "execution"

    @property
    def _membership_file(self) -> StoragePath:
        return self.work_directory / "membership"


def _text(path: StoragePath) -> str:
    try:
        return storage_of(path).read().decode()
    except FileNotFoundError:
        return ""
