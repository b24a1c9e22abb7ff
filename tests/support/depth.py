"""How much tests try: the same in every run, or more, and something else each time, with `--deep`."""

import random
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Depth:
    """Is chosen before tests are collected."""

    is_deep: bool = False
    seed: int = 0
    """Seed of what is drawn in deep runs."""

    def of(self, usual: T, deep: T) -> T:
        return deep if self.is_deep else usual

    def chance(self, name: str) -> random.Random:
        """A generator for the test of that name: the same in every run that is not deep."""
        return random.Random(self.of(name, f"{name} {self.seed}"))


DEPTH = Depth()
