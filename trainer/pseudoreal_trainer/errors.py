"""Exceptions (their texts are sentences for users), and the chain of causes of an exception."""

from collections.abc import Iterator
from contextlib import contextmanager


class InvalidJobError(ValueError):
    """The job cannot run as its spec says, and retries cannot help; the text names the necessary change."""


class TrainingError(RuntimeError):
    """The phase cannot continue; the text gives the reason and the remedy.

    `suspect`: rank at fault, in another pod; None if unknown, or if a rank of this pod is at fault.
    """

    def __init__(self, text: str, suspect: int | None = None) -> None:
        super().__init__(text)
        self.suspect = suspect


class NotExportable(ValueError):
    """The export format cannot express the model; the text gives the reason."""


class UnfitWeights(ValueError):
    """This job cannot start from the weights of another program; the text gives the reason."""


class PeerFailed(Exception):
    """Another rank has failed and reports the reason itself."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, then each explicit cause (`__cause__`) in turn."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def how_to_install(extra: str) -> str:
    """Return a sentence. It names files, because nothing by the project's name is published on an index of packages."""
    return (
        f"run pip install '.[{extra}]' in a checkout, or pip install 'FILE[{extra}]' with the wheel file of a release"
    )


@contextmanager
def from_extra(extra: str) -> Iterator[None]:
    """Turn the ModuleNotFoundError of an import in the context into an InvalidJobError that names the extra to
    install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InvalidJobError(
            f"the Python package {error.name} is not installed, which this needs; {how_to_install(extra)}"
        ) from error
