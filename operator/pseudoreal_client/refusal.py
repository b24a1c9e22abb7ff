"""End of a command with an unfulfilled request: a sentence with the remedy, and an exit code for scripts."""

from enum import IntEnum

from pseudoreal_api.wire.messages import ExitCode


class ExitStatus(IntEnum):
    """Exit codes of the commands for a cluster. Exit code 2 is click's, for a wrong command line."""

    DONE = 0
    REFUSED = 1
    NO_CLUSTER = 3
    FORBIDDEN = 4
    NOT_FOUND = 5
    NOT_INSTALLED = 6
    INVALID_JOB = ExitCode.INVALID_JOB


class Refusal(Exception):
    """Ends the command: the sentence goes to stderr, and `status` becomes the exit code."""

    def __init__(self, sentence: str, status: ExitStatus = ExitStatus.REFUSED) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.status = status
