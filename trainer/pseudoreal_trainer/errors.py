"""Exceptions with a sentence for users as their text, and the chain of causes of an exception."""

from collections.abc import Iterator


class InvalidJobError(ValueError):
    """The job cannot run as its spec says, and retries cannot help; the text names the necessary change."""


class TrainingError(RuntimeError):
    """The phase cannot go on; the text gives the reason and the remedy.

    `suspect` is the rank of another pod at fault; None if unknown.
    """

    def __init__(self, text: str, suspect: int | None = None) -> None:
        super().__init__(text)
        self.suspect = suspect


class PeerFailed(Exception):
    """Another rank has failed and reports the reason itself."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, then each explicit cause (`__cause__`) in turn."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
