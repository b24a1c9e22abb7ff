"""Fence: keeps replaced ranks from committing checkpoints that their successors do not expect."""

from dataclasses import dataclass

from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.storage.path import StoragePath
from pseudoreal_trainer.storage.storage import storage_of


@dataclass(frozen=True)
class Fence:
    """Fence for ranks of one identity: execution, phase and membership. The identity is checked before each commit.

    The phase is the position of the phase that the ranks train or delink into. An execution keeps its number from stage
    to stage. Identities are ordered by execution, then phase, then membership. Ranks with an earlier identity stop. The
    membership is the number of the latest in-place restart in which a spare pod became a worker; the replaced pod may
    still run on an unreachable node. In-place restarts that replace no pod need no membership, because no rank from
    before such a restart is alive.
    """

    work_directory: StoragePath
    execution: int
    membership: int = 0
    phase: int = 0
    """Position of the phase in the job, counted from 0."""

    def claim(self) -> None:
        """Record this identity, so that ranks with an earlier identity can no longer commit.

        Raises TrainingError if a later execution, phase or membership has already started, or the storage is not
        writable.
        """
        self.check()
        try:
            storage_of(self.work_directory).make_folder()
            storage_of(self._execution_file).replace(str(self.execution))
            # Two files, because trainers of earlier releases read a single number from the first. A crash between the
            # two writes is harmless: no checkpoint has been written yet, and each file only grows.
            if self.membership or self.phase:
                content = f"{self.execution}.{self.membership}.{self.phase}"
                storage_of(self._membership_file).replace(content)
        except OSError as error:
            raise TrainingError(
                f"the work directory {self.work_directory} cannot be written to: {error}; every pod of the job needs a"
                " volume that it may write to, with room for checkpoints"
            ) from error

    def check(self) -> None:
        """Raise TrainingError if a later execution, a later phase of this execution, or a later membership has
        started."""
        newest = int(_text(self._execution_file) or self.execution)
        if newest > self.execution:
            raise TrainingError(
                f"execution {self.execution} was replaced by execution {newest}; it stops without saving"
            )
        # Release 0.3 wrote no phase, read as -1. All ranks of a stage run one image, so a file without a phase is from
        # an earlier stage.
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
