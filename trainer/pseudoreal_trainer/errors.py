"""Errors whose text is a sentence for people, and what an error was raised from."""

from collections.abc import Iterator


class InvalidJobError(ValueError):
    """The job cannot run as its spec says, however often it is tried; the text says what to change."""


class TrainingError(RuntimeError):
    """The phase cannot go on; the text says why and what to do. `suspect` is the rank of another pod that caused it."""

    def __init__(self, text: str, suspect: int | None = None) -> None:
        super().__init__(text)
        self.suspect = suspect


class PeerFailed(Exception):
    """Another rank has failed, and says why itself."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
