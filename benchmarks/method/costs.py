"""What the stages of an arm cost, as shares of unshared training: operations, bytes of state, and seconds. Pure.

Shares are of the layers, without the embedding and the head: those are much of a small model, most of its state while
one block is shared, and little of a large one, and the trials are to speak for large ones. `StageCost` has both parts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.plan.sizes import Sizes, compute_bytes, master_bytes
from pseudoreal_trainer.plan.units import units_of
from pseudoreal_trainer.plan.utilisation import step_operations

from benchmarks.method import arms
from benchmarks.method.arms import REGISTERED, Arm, Scale, Stage, Study

_VECTORS = 3
"""Float32 vectors of an element's state: master weight and two moments."""


@dataclass(frozen=True)
class StageCost:
    """Cost of a step's token, and of a step's state."""

    flops: int
    """Floating-point operations of the layers for a token, forward and backward."""
    head_flops: int
    state_bytes: int
    """Bytes of the layers' state, which pass through the device once a step where the state is elsewhere."""
    embedding_bytes: int
    """Bytes of the state of the embedding and the final norm."""


@cache
def stage_cost(study: Study, width: int, stage: Stage, scale: Scale = REGISTERED) -> StageCost:
    """Return the cost of a stage as the trainer counts it: attention to half of the tokens, a token's own experts."""
    body = arms.model(study, width, scale) | {"layers": stage.layers}
    if stage.experts is not None:
        body["experts"] = body["experts"] | {"count": stage.experts}
    model = Model.model_validate(body)
    parts = {"parts": ["Experts"]} if stage.shares_experts else {}
    sharing = Sharing.model_validate({"blocks": stage.blocks} | parts)
    sizes = Sizes(
        model, units_of(model, sharing), compute_bytes(scale.precision), master_bytes(scale.precision), scale.sequences
    )
    tokens = scale.tokens_of_a_step
    head = 3 * 2 * model.hidden_size * model.vocabulary_size
    embedding, *layers = sizes.units
    return StageCost(
        flops=step_operations(sizes, tokens) // tokens - head,
        head_flops=head,
        state_bytes=_VECTORS * sizes.master_bytes * sum(unit.trained for unit in layers),
        embedding_bytes=_VECTORS * sizes.master_bytes * embedding.trained,
    )


@dataclass(frozen=True)
class Share:
    """A stage beside a step of unshared training."""

    until: float
    flops: float
    """Share of the operations."""
    state: float
    """Share of the bytes of the state."""


@dataclass(frozen=True)
class Spending:
    """Cost of an arm's training, in units of as much unshared training: 1 is the whole of it."""

    ends: tuple[float, ...]
    """Ends of the stages, as fractions of the full budget."""
    prices: tuple[float, ...]
    """Price of a token in each stage, relative to a token of unshared training."""

    def until(self, fraction: float) -> float:
        """Return the cost of the first `fraction` of the full budget."""
        begins = (0.0, *self.ends[:-1])
        spans = [max(0.0, min(fraction, end) - begin) for begin, end in zip(begins, self.ends, strict=True)]
        return sum(span * price for span, price in zip(spans, self.prices, strict=True))


def shares(study: Study, width: int, arm: Arm, scale: Scale = REGISTERED) -> list[Share]:
    """Return the arm's stages beside unshared training at this width of the study."""
    real = stage_cost(study, width, unshared(study).stages[-1], scale)
    found = []
    for stage in arm.stages:
        own = stage_cost(study, arm.width.get(width, width), stage, scale)
        found.append(Share(stage.until, own.flops / real.flops, own.state_bytes / real.state_bytes))
    return found


def unshared(study: Study) -> Arm:
    return arms.ARMS[study][0]


Price = Callable[[Sequence[Share], int], float]
"""Stages of an arm, index of one -> price of its tokens."""


def spending(stages: Sequence[Share], price: Price) -> Spending:
    return Spending(tuple(s.until for s in stages), tuple(price(stages, index) for index in range(len(stages))))


def by_tokens(_stages: Sequence[Share], _index: int) -> float:
    return 1.0


def by_flops(stages: Sequence[Share], index: int) -> float:
    return stages[index].flops


def by_bytes(stages: Sequence[Share], index: int) -> float:
    return stages[index].state


def by_seconds(ratio: float) -> Price:
    """Return the price of a token in seconds, relative to unshared training.

    `ratio`: seconds of an unshared step divided by the seconds of its computing, at least 1; the rest is waiting for
    the state. Copies run beside the computing, so a step takes the longer of both: `flops` / ratio, and `state`. A
    pseudo step with little state only computes. Then `ratio` is the cost ratio of the plan: cost of a real step divided
    by cost of a pseudo step.
    """

    def price(stages: Sequence[Share], index: int) -> float:
        return max(stages[index].flops / ratio, stages[index].state)

    return price
