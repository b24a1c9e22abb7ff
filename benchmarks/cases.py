"""Models that are measured, and the cases that every stack runs. Pure."""

from dataclasses import dataclass

from pseudoreal_api.spec.model import Attention, FeedForward, Model
from pydantic import BaseModel

RANKS = 2


@dataclass(frozen=True)
class Effort:
    """Number of rounds, each with fresh processes, and of steps in a round; the `warm_up` steps are not timed."""

    rounds: int
    warm_up: int
    timed: int


@dataclass(frozen=True)
class BenchmarkModel:
    spec: Model
    effort: Effort
    sequences: int = 16
    """Sequences per step over all ranks; more if a rank would otherwise have no sequence in a micro-batch."""
    micro_batches: tuple[int, ...] = (1, 4, 16)


def _model(layers: int, hidden_size: int, sequence_length: int) -> Model:
    """Return a model with heads of 64 features, and MLPs four times as wide as its hidden size."""
    return Model(
        layers=layers,
        hidden_size=hidden_size,
        attention=Attention(heads=hidden_size // 64),
        sequence_length=sequence_length,
        feed_forward=FeedForward(size=4 * hidden_size),
    )


MODELS = {
    "tiny": BenchmarkModel(
        _model(layers=6, hidden_size=256, sequence_length=64),
        effort=Effort(rounds=2, warm_up=2, timed=5),
    ),
    "larger": BenchmarkModel(
        _model(layers=16, hidden_size=512, sequence_length=64),
        effort=Effort(rounds=1, warm_up=1, timed=5),
    ),
    "long": BenchmarkModel(
        _model(layers=4, hidden_size=256, sequence_length=2048),
        effort=Effort(rounds=1, warm_up=1, timed=5),
        sequences=4,
        micro_batches=(1, 4),
    ),
    "hundred": BenchmarkModel(
        _model(layers=8, hidden_size=1024, sequence_length=64),
        effort=Effort(rounds=1, warm_up=1, timed=5),
        micro_batches=(1, 4),
    ),
    "three-hundred": BenchmarkModel(
        _model(layers=24, hidden_size=1024, sequence_length=1024),
        effort=Effort(rounds=1, warm_up=1, timed=2),
        sequences=2,
        micro_batches=(1,),
    ),
}
"""Models by name. `long` has sequences as long as in real training; `hundred` has 101 M parameters. `three-hundred` has
303 M, and a step of one sequence per rank takes about half a minute on one core."""


class Case(BaseModel, frozen=True):
    model: str
    micro_batches: int
    recompute: bool

    @property
    def sequences(self) -> int:
        """Sequences per step over all ranks: each rank has at least one in every micro-batch."""
        return max(MODELS[self.model].sequences, RANKS * self.micro_batches)

    @property
    def label(self) -> str:
        return f"{self.model}, n = {self.micro_batches}, {'recompute' if self.recompute else 'kept'}"


def all_cases() -> list[Case]:
    """Return all cases: every model with activations kept, and one with recomputation, which costs all
    stacks the same."""
    kept = [Case(model=m, micro_batches=n, recompute=False) for m in MODELS for n in MODELS[m].micro_batches]
    return sorted([*kept, Case(model="tiny", micro_batches=4, recompute=True)], key=lambda c: [*MODELS].index(c.model))
