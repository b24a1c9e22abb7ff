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
    effort: Effort


MODELS = {
    "tiny": BenchmarkModel(
        Model(layers=6, hidden=256, heads=4, sequence=64, ffn=FeedForward(hidden=1024)),
        effort=Effort(rounds=2, warm_up=2, timed=5),
    ),
    "larger": BenchmarkModel(
        Model(layers=16, hidden=512, heads=8, sequence=64, ffn=FeedForward(hidden=2048)),
        effort=Effort(rounds=1, warm_up=1, timed=5),
    ),
}


class Case(BaseModel, frozen=True):
    model: str
    micro_batches: int
    recompute: bool

    @property
    def sequences(self) -> int:
        """Of a step, over all ranks: 16, or as many as give each rank one in every micro-batch."""
        return max(16, RANKS * self.micro_batches)

    @property
    def label(self) -> str:
        return f"{self.model}, n = {self.micro_batches}, {'recompute' if self.recompute else 'kept'}"


def all_cases() -> list[Case]:
    """Kept activations everywhere; recomputed ones, which cost all stacks the same, once."""
    kept = [Case(model=m, micro_batches=n, recompute=False) for m, n in product(MODELS, MICRO_BATCHES)]
    return sorted([*kept, Case(model="tiny", micro_batches=4, recompute=True)], key=lambda c: [*MODELS].index(c.model))
