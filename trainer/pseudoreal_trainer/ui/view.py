"""Content of the live page, wherever the jobs are. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pseudoreal_trainer.report.job import Job

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Row:
    """Line of the list of jobs."""

    id: str
    """Path of the job's page below /job/."""
    name: str
    place: str
    """Namespace, or folder."""
    state: str
    phase: str = ""
    progress: str = ""
    loss: str = ""
    restarts: str = ""
    since: str = ""
    """Time, UTC, of the job's creation, or of its last sign of life."""
    note: str = ""
    """Sentence on the state."""


@dataclass(frozen=True)
class Listing:
    """All jobs. `notices`: sentences about what is missing, and why."""

    rows: Sequence[Row]
    notices: Sequence[str] = ()


@dataclass(frozen=True)
class Command:
    """Command that would change the job, as text to copy."""

    effect: str
    text: str
    refusal: str = ""
    """Sentence on why it would change nothing now; empty: it would."""


@dataclass(frozen=True)
class Table:
    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class JobView:
    """All that the page of a job shows."""

    name: str
    place: str
    state: str
    job: Job
    """Figures, restarts and checkpoints, as far as they are known."""
    facts: Sequence[tuple[str, str]] = ()
    """Label and value."""
    tables: Sequence[Table] = ()
    description: Sequence[str] = ()
    """Lines of `pseudoreal describe`."""
    commands: Sequence[Command] = ()
    notices: Sequence[str] = ()
    """Sentences about what is missing, and why."""
    is_gone: bool = False
    """Whether the job was deleted; the rest is as it was before."""


class Feed(Protocol[T_co]):
    """Content that changes. One thread reads it; any thread may close it."""

    def read(self) -> T_co | None:
        """Return the content; None if nothing has changed. May take as long as the storage takes, or hang.

        The sentence of a TrainingError, OSError or ClientError is shown, and the content of the read before stays.
        """
        ...

    def wait(self) -> None:
        """Return when the content is to be read again; at once after `close`."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Labels:
    """Words of the list that depend on where the jobs are."""

    title: str
    place: str
    since: str
    about: str
    """Sentence on where the list comes from."""


class Source(Protocol):
    """Jobs that a page can show."""

    labels: Labels

    def listing(self) -> Feed[Listing]: ...

    def job(self, id: str) -> Feed[JobView] | None:
        """Return the feed of a job of the list; None if the list has no such job. Does not wait."""
        ...
