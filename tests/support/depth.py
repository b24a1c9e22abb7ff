"""Amount of randomized testing: fixed and reproducible by default, more and different in each run with `--deep`."""

import random
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Depth:
    """Test depth, set before tests are collected."""

    is_deep: bool = False
    seed: int = 0
    """Seed of random draws in deep runs."""

    def of(self, usual: T, deep: T) -> T:
        return deep if self.is_deep else usual

    def chance(self, name: str) -> random.Random:
        """Return a random generator for the test with this name; the same in all runs without `--deep`."""
        return random.Random(self.of(name, f"{name} {self.seed}"))


DEPTH = Depth()
