"""The registered arms of docs/method-plan.md: which layers and blocks train when. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Study = Literal["dense", "experts"]
UNSHARED = "unshared"


@dataclass(frozen=True)
class Stage:
    """A phase of an arm, without its batch and its schedule."""

    until: float
    """End of the stage, as a fraction of the full budget."""
    layers: int
    blocks: int
    """Distinct blocks, or distinct sets of experts with `shares_experts`; equal to `layers` without sharing."""
    shares_experts: bool = False
    experts: int | None = None
    """Experts of a layer; None for a dense layer."""

    @property
    def name(self) -> str:
        """Name of the phase. Arms that begin alike have phases of the same name, so that one continues the other."""
        kind = "sets" if self.shares_experts else "blocks"
        experts = "" if self.experts is None else f"-experts{self.experts}"
        return f"layers{self.layers}-{kind}{self.blocks}{experts}"


@dataclass(frozen=True)
class Arm:
    name: str
    stages: tuple[Stage, ...]
    tuned_as: str
    """Name of the arm whose peak rate this arm takes."""
    is_primary: bool = False
    """True for an arm that carries the conclusion: five seeds, and every size."""
    width: Mapping[int, int] = field(default_factory=dict)
    """Width of the study -> width of this arm, where they differ."""

    @property
    def budgets(self) -> tuple[float, ...]:
        return (*EARLY_BUDGETS, *BUDGETS) if self.name == UNSHARED else BUDGETS


@dataclass(frozen=True)
class Size:
    width: int
    seeds: int
    """Seeds of primary arms."""
    all_arms: bool = False
    """True if the other arms are trained, too, with `OTHER_SEEDS` seeds."""


OTHER_SEEDS = 3
TUNING_SEED = 100
"""Seed that chooses the peak rates; no compared run has it."""
TUNED_FRACTION = 0.5
"""Budget of the runs that choose peak rates, as a fraction of the full one."""
FIRST_RATES = (8e-3, 16e-3, 32e-3)
"""Peak rates that are tried first; while the best one is at the edge, the next one beyond, by a factor of 2."""

BUDGETS = (0.5, 0.75, 1.0)
"""Budgets at which an arm is compared, as fractions of the full one."""
EARLY_BUDGETS = (0.2, 0.35)
"""Further budgets of the unshared arm: an arm that ends above its loss at half the budget is placed on its curve."""
DECAY = 0.2
"""Share of each budget in which the rate decays to zero."""
TOKENS_PER_PARAMETER = 20
SEQUENCE, SEQUENCES = 128, 16
TOKENS_OF_A_STEP = SEQUENCE * SEQUENCES
VOCABULARY = 4096
WARMUP = 0.1
"""Share of the full budget in which the rate rises."""
HEAD_SIZE = 8


def _dense(until: float, layers: int = 12, blocks: int | None = None) -> Stage:
    return Stage(until, layers, layers if blocks is None else blocks)


def _mixture(until: float, layers: int = 6, blocks: int | None = None, **more: Any) -> Stage:
    return Stage(until, layers, layers if blocks is None else blocks, experts=more.pop("experts", 8), **more)


_REAL, _EXPERTS = _dense(1), _mixture(1)

DENSE = (
    Arm(UNSHARED, (_REAL,), UNSHARED, is_primary=True),
    Arm("shared throughout", (_dense(1, blocks=1),), "shared throughout"),
    Arm("4 blocks throughout", (_dense(1, blocks=4),), "4 blocks throughout"),
    Arm("delinked at 10 %", (_dense(0.1, blocks=1), _REAL), "delinked at 30 %"),
    Arm("delinked at 30 %", (_dense(0.3, blocks=1), _REAL), "delinked at 30 %", is_primary=True),
    Arm("delinked at 50 %", (_dense(0.5, blocks=1), _REAL), "delinked at 30 %"),
    Arm("4 blocks, delinked at 30 %", (_dense(0.3, blocks=4), _REAL), "4 blocks, delinked at 30 %", is_primary=True),
    Arm("1, 4, 12 blocks", (_dense(0.1, blocks=1), _dense(0.3, blocks=4), _REAL), "4 blocks, delinked at 30 %"),
    Arm("grown from 4 layers at 30 %", (_dense(0.3, 4), _REAL), "grown from 4 layers at 30 %", is_primary=True),
    Arm("grown from 1 layer at 50 %", (_dense(0.5, 1), _REAL), "grown from 1 layer at 50 %"),
    Arm("small model", (_REAL,), UNSHARED, width={16: 12, 24: 16}),
)
EXPERTS = (
    Arm(UNSHARED, (_EXPERTS,), UNSHARED, is_primary=True),
    Arm(
        "experts shared throughout",
        (_mixture(1, blocks=1, shares_experts=True),),
        "experts shared throughout",
        is_primary=True,
    ),
    *(
        Arm(
            f"experts delinked at {round(100 * until)} %",
            (_mixture(until, blocks=1, shares_experts=True), _EXPERTS),
            "experts delinked at 30 %",
            is_primary=until == 0.3,
        )
        for until in (0.1, 0.3, 0.5)
    ),
    Arm("blocks delinked at 30 %", (_mixture(0.3, blocks=1), _EXPERTS), "blocks delinked at 30 %"),
    Arm("upcycled from 2 experts at 30 %", (_mixture(0.3, experts=2), _EXPERTS), "upcycled from 2 experts at 30 %"),
    Arm("grown from 2 layers at 30 %", (_mixture(0.3, 2), _EXPERTS), "grown from 2 layers at 30 %", is_primary=True),
)
ARMS: dict[Study, tuple[Arm, ...]] = {"dense": DENSE, "experts": EXPERTS}

TUNED_WIDTH = 16
SIZES: dict[Study, tuple[Size, ...]] = {
    "dense": (Size(16, seeds=5, all_arms=True), Size(24, seeds=5, all_arms=True), Size(32, seeds=3)),
    "experts": (Size(16, seeds=5, all_arms=True), Size(24, seeds=5, all_arms=True), Size(32, seeds=3)),
}
"""Sizes, in the order in which they are trained."""


def parameters(study: Study, width: int) -> int:
    """Return the parameters of a layer's matrices that a token passes, over all layers, without the embedding."""
    attention = 4 * width**2
    if study == "dense":
        return 12 * (attention + 8 * width**2)
    return 6 * (attention + EXPERTS_PER_TOKEN * 3 * width * 2 * width)


EXPERTS_PER_TOKEN = 2


def full_steps(study: Study, width: int) -> int:
    """Return the steps of the full budget."""
    return round(TOKENS_PER_PARAMETER * parameters(study, width) / TOKENS_OF_A_STEP)


def model(study: Study, width: int) -> dict[str, Any]:
    """Return spec.model of the real phase."""
    common = {
        "layers": 12 if study == "dense" else 6,
        "hiddenSize": width,
        "vocabularySize": VOCABULARY,
        "embeddings": "Tied",
        "attention": {"heads": width // HEAD_SIZE},
        "sequenceLength": SEQUENCE,
    }
    if study == "dense":
        return common | {"feedForward": {"size": 4 * width}}
    experts = {"type": "TopK", "count": 8, "topK": {"perToken": EXPERTS_PER_TOKEN, "auxiliaryLoss": "0.01"}}
    return common | {"feedForward": {"size": 2 * width, "activation": "SwiGLU"}, "experts": experts}
