"""Findings of the doctor, on disk."""

from typing import Literal

from pydantic import BaseModel, TypeAdapter

Outcome = Literal["passed", "failed", "not tried"]


class Finding(BaseModel, frozen=True):
    """Outcome of a check."""

    check: str
    outcome: Outcome
    text: str
    """Figures of a check that passed; a sentence with the remedy of one that failed; the reason of one not tried."""
    seconds: float


Findings = TypeAdapter(list[Finding])
