"""Errors of the tooling, shown without a traceback."""

from dataclasses import dataclass


class DevError(Exception):
    """The tooling cannot go on; the message names the cause on this machine and the remedy."""


@dataclass(frozen=True)
class Problem:
    """A missing requirement, and its remedy."""

    missing: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.missing}. {self.remedy}"


class Missing(DevError):
    """A requirement is missing."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem
