"""What is measured: the models, and the cases that every stack runs. Pure."""

from dataclasses import dataclass
from itertools import product

from pseudoreal_api.model_spec import FeedForward, Model
from pydantic import BaseModel

RANKS = 2
MICRO_BATCHES = (1, 4, 16)


@dataclass(frozen=True)
class Effort:
    """Fresh processes in each round; a step of `warm_up` is not timed."""

    rounds: int
    warm_up: int
    timed: int


@dataclass(frozen=True)
class BenchmarkModel:
    spec: Model
    sequences: int
    """Of a step, over all ranks: at least one for each rank and micro-batch."""
    effort: Effort


MODELS = {
    "tiny": BenchmarkModel(
        Model(layers=6, hidden=256, heads=4, sequence=64, ffn=FeedForward(hidden=1024)),
        sequences=32,
        effort=Effort(rounds=3, warm_up=2, timed=5),
    ),
    "larger": BenchmarkModel(
        Model(layers=16, hidden=512, heads=8, sequence=64, ffn=FeedForward(hidden=2048)),
        sequences=32,
        effort=Effort(rounds=2, warm_up=2, timed=3),
    ),
}


class Case(BaseModel, frozen=True):
    model: str
    micro_batches: int
    recompute: bool

    @property
    def label(self) -> str:
        return f"{self.model}, n = {self.micro_batches}, {'recompute' if self.recompute else 'kept'}"


def all_cases() -> list[Case]:
    return [
        Case(model=model, micro_batches=count, recompute=recompute)
        for model, recompute, count in product(MODELS, (True, False), MICRO_BATCHES)
    ]
