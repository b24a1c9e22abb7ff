"""A clock that a test sets by hand."""

from dataclasses import dataclass


@dataclass
class HandClock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now
