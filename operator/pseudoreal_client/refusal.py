"""How a command ends that cannot do what it was asked: a sentence with the remedy, and an exit code for scripts."""

from enum import IntEnum

from pseudoreal_api.wire.messages import ExitCode


class ExitStatus(IntEnum):
    """The exit codes of the commands for a cluster. 2 is click's, for a command line that makes no sense."""

    DONE = 0
    REFUSED = 1
    NO_CLUSTER = 3
    FORBIDDEN = 4
    NOT_FOUND = 5
    NOT_INSTALLED = 6
    INVALID_JOB = ExitCode.INVALID_JOB


class Refusal(Exception):
    """Ends the command with that sentence on stderr and that exit code."""

    def __init__(self, sentence: str, status: ExitStatus = ExitStatus.REFUSED) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.status = status
