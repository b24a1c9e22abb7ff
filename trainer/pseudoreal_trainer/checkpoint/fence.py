"""Keeps ranks that were replaced from committing what their successors do not expect."""

from dataclasses import dataclass

from pseudoreal_trainer.checkpoint.storage.path import StoragePath
from pseudoreal_trainer.checkpoint.storage.storage import storage_of
from pseudoreal_trainer.errors import TrainingError


@dataclass(frozen=True)
class Fence:
    """The identity of ranks that may commit, checked before each commit: the execution, the position of the phase that
    they train or delink into, and the membership.

    An execution passes from stage to stage with its number, so the three are ordered in this way: whoever is of an
    earlier execution, of an earlier phase of the execution, or of an earlier membership in the phase stops. The
    membership is the number of the restart in place with which a spare pod last took a place among the ranks: the pod
    that had the place may live on where nobody can end it. Restarts by which no pod was replaced need no number, as no
    rank from before such a restart lives.
    """

    work_directory: StoragePath
    execution: int
    membership: int = 0
    phase: int = 0
    """Position of the phase in the job."""

    def claim(self) -> None:
        """Shut out the ranks that are ordered before these.

        Raises TrainingError when a later execution, phase or membership has already begun, or the storage cannot be
        written to.
        """
        self.check()
        try:
            storage_of(self.work_directory).make_folder()
            storage_of(self._execution_file).replace(str(self.execution))
            # Two files, as trainers of earlier releases read a number in the first. Whoever dies between the two has
            # written no checkpoint yet, and each of them alone only grows.
            if self.membership or self.phase:
                content = f"{self.execution}.{self.membership}.{self.phase}"
                storage_of(self._membership_file).replace(content)
        except OSError as error:
            raise TrainingError(
                f"the work directory {self.work_directory} cannot be written to: {error}; every pod of the job needs a"
                " volume that it may write to, with room for checkpoints"
            ) from error

    def check(self) -> None:
        """Raises TrainingError when a later execution has begun, a later phase of this one, or a later membership."""
        newest = int(_text(self._execution_file) or self.execution)
        if newest > self.execution:
            raise TrainingError(
                f"execution {self.execution} was replaced by execution {newest}; it stops without saving"
            )
        # Trainers of release 0.3 wrote no phase. All ranks of a stage have one image, so these here are of a later one.
        execution, membership, phase, *_ = [*(_text(self._membership_file) or "0.0").split("."), "-1"]
        if int(execution) != self.execution:
            return
        if int(phase) > self.phase:
            raise TrainingError(
                f"phase {phase} (counted from 0) of the job has begun in execution {self.execution}, and these ranks"
                f" are of phase {self.phase}; they stop without saving"
            )
        if int(phase) == self.phase and int(membership) > self.membership:
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
