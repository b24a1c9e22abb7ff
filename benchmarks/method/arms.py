"""The registered arms of docs/method-plan.md: which layers and blocks train when. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Study = Literal["dense", "experts"]
Ties = Literal["Middle", "Matrices"]
"""A sharing that jobs do not have. Middle: the layers of the middle half share one block, the others own theirs.
Matrices: all layers share one block, except its norms and routers."""
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
    ties: Ties | None = None
    """Trained by `plain.py` instead of a job."""

    @property
    def name(self) -> str:
        """Name of the phase. Arms that begin alike have phases of the same name, so that one continues the other."""
        kind = "sets" if self.shares_experts else "blocks"
        shared = f"{kind}{self.blocks}" if self.ties is None else self.ties.lower()
        experts = "" if self.experts is None else f"-experts{self.experts}"
        return f"layers{self.layers}-{shared}{experts}"


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
    delink: Mapping[str, str] = field(default_factory=dict)
    """Fields of spec.delink."""
    first_tuned_as: str | None = None
    """Name of the arm whose peak rate the first stage takes; None: as `tuned_as`."""
    warms_up_again: bool = False
    """True if the rate rises from zero once more after the transition, for `SECOND_WARMUP`."""

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
"""Budget of the first runs that choose peak rates, as a fraction of the full one."""
FIRST_RATES = (4e-3, 8e-3, 16e-3)
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
VOCABULARY = 512
WARMUP = 0.1
"""Share of the full budget in which the rate rises."""
SECOND_WARMUP = 0.05
"""Share of the full budget in which the rate rises once more, after a transition that warms up again."""
MEASURED_STEPS = 20
"""Steps before the transition in which the moments policy `Measured` measures gradients (delink.measuredSteps)."""
HEAD_SIZE = 8


LAYERS: dict[Study, int] = {"dense": 12, "experts": 6}
"""Layers of the real phase."""


def _dense(until: float, layers: int = LAYERS["dense"], blocks: int | None = None) -> Stage:
    return Stage(until, layers, layers if blocks is None else blocks)


def _mixture(until: float, layers: int = LAYERS["experts"], blocks: int | None = None, **more: Any) -> Stage:
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
    Arm("small model", (_REAL,), "small model", width={24: 10}),
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


def _remedies(base: Arm, shared: str, *more: Arm) -> tuple[Arm, ...]:
    """Return the arms of the plan's last section: `base` with one change each. `shared`: the arm that shares throughout
    as the base's first stage does."""

    def changed(change: str, **fields: Any) -> Arm:
        return replace(base, name=f"{base.name}, {change}", is_primary=False, **fields)

    return (
        changed("rates of each phase, warmed up again", tuned_as=UNSHARED, first_tuned_as=shared, warms_up_again=True),
        changed("noise", delink={"noise": "0.1"}),
        changed("Measured", delink={"optimizerState": "Measured"}),
        changed("Reset", delink={"optimizerState": "Reset"}),
        *(replace(one, is_primary=False) for one in more),
    )


BASES: dict[Study, str] = {"dense": "delinked at 30 %", "experts": "experts delinked at 30 %"}
"""Arms that the remedies change."""


def named(study: Study, name: str) -> Arm:
    return next(arm for arm in ARMS[study] if arm.name == name)


REMEDIES: dict[Study, tuple[Arm, ...]] = {
    "dense": _remedies(
        named("dense", BASES["dense"]),
        "shared throughout",
        Arm("4 blocks, delinked at 10 %", (_dense(0.1, blocks=4), _REAL), "4 blocks, delinked at 30 %"),
        Arm("6 blocks, delinked at 10 %", (_dense(0.1, blocks=6), _REAL), "4 blocks, delinked at 30 %"),
        Arm(
            "middle half shared, delinked at 30 %",
            (replace(_dense(0.3, blocks=7), ties="Middle"), _REAL),
            "4 blocks, delinked at 30 %",
        ),
        Arm(
            "all but norms shared, delinked at 30 %",
            (replace(_dense(0.3, blocks=1), ties="Matrices"), _REAL),
            "delinked at 30 %",
        ),
    ),
    "experts": _remedies(
        named("experts", BASES["experts"]),
        "experts shared throughout",
        Arm(
            "2 sets of experts, delinked at 10 %",
            (_mixture(0.1, blocks=2, shares_experts=True), _EXPERTS),
            "experts delinked at 30 %",
        ),
        Arm(
            "blocks but routers and norms delinked at 30 %",
            (replace(_mixture(0.3, blocks=1), ties="Matrices"), _EXPERTS),
            "blocks delinked at 30 %",
        ),
    ),
}
"""Arms of the plan's section "If the answer is no"."""

TUNED_WIDTH = 24
SIZES: dict[Study, tuple[Size, ...]] = {
    "dense": (Size(24, seeds=5, all_arms=True), Size(16, seeds=5), Size(32, seeds=5)),
    "experts": (Size(24, seeds=5, all_arms=True), Size(16, seeds=5), Size(32, seeds=5)),
}
"""Sizes, in the order in which they are trained."""


@dataclass(frozen=True, eq=False)
class Scale:
    """Arms with the sizes of their models, batches and budgets. The defaults are the registered ones."""

    arms: Mapping[Study, tuple[Arm, ...]] = field(default_factory=lambda: ARMS)
    sizes: Mapping[Study, tuple[Size, ...]] = field(default_factory=lambda: SIZES)
    remedies: Mapping[Study, tuple[Arm, ...]] = field(default_factory=dict)
    tuned_width: int = TUNED_WIDTH
    budgets: tuple[float, ...] | None = None
    """Budgets of all arms; None: those of each arm."""
    first_rates: tuple[float, ...] = FIRST_RATES
    tokens_per_parameter: float = TOKENS_PER_PARAMETER
    sequence: int = SEQUENCE
    sequences: int = SEQUENCES
    micro_batches: int = 1
    vocabulary: int = VOCABULARY
    head_size: int = HEAD_SIZE
    precision: Literal["float32", "bfloat16"] = "float32"
    text: str = "kernel"
    """Folder of the text that arms are compared on."""
    tuning_text: str = "kernel-tuning"
    """Folder of the text that peak rates are chosen on."""
    names_tokenizer: bool = True
    """True if jobs name the tokenizer beside their text; measuring needs the token files alone."""

    @property
    def tokens_of_a_step(self) -> int:
        return self.sequence * self.sequences


REGISTERED = Scale(remedies=REMEDIES)


def _named(study: Study, *names: str) -> tuple[Arm, ...]:
    return tuple(arm for arm in ARMS[study] if arm.name in names)


def _primary(study: Study, *more: str) -> tuple[Arm, ...]:
    return tuple(arm for arm in ARMS[study] if arm.is_primary or arm.name in more)


QUICK = Scale(
    arms={"dense": _named("dense", UNSHARED, "shared throughout", "delinked at 30 %", "grown from 4 layers at 30 %")},
    sizes={"dense": (Size(16, seeds=2, all_arms=True),)},
    budgets=(1.0,),
)
"""Trials of ten minutes: the smallest registered size, at the registered rates."""

GPU = Scale(
    arms={"dense": _primary("dense", "shared throughout"), "experts": _primary("experts")},
    sizes={"dense": (Size(768, seeds=3, all_arms=True),), "experts": (Size(768, seeds=3, all_arms=True),)},
    tuned_width=768,
    first_rates=(6e-4, 1.2e-3, 2.4e-3),
    sequence=1024,
    sequences=256,
    micro_batches=8,
    head_size=64,
    precision="bfloat16",
    names_tokenizer=False,
)
"""Trials on a GPU, on a text of the user: layers of GPT-2's size, 124 M parameters with its vocabulary. With experts
223 M, of which a token passes 95 M."""

TINY = replace(
    GPU,
    sizes={"dense": (Size(16, seeds=1, all_arms=True),), "experts": (Size(16, seeds=1, all_arms=True),)},
    tuned_width=16,
    budgets=(1.0,),
    first_rates=FIRST_RATES,
    tokens_per_parameter=0.6,
    sequence=32,
    sequences=8,
    micro_batches=2,
    head_size=8,
)
"""Trials that only try the program."""


def parameters(study: Study, width: int) -> int:
    """Return the parameters of a layer's matrices that a token passes, over all layers, without the embedding."""
    attention = 4 * width**2
    if study == "dense":
        return LAYERS[study] * (attention + 8 * width**2)
    return LAYERS[study] * (attention + EXPERTS_PER_TOKEN * 3 * width * 2 * width)


EXPERTS_PER_TOKEN = 2


def full_steps(study: Study, width: int, scale: Scale = REGISTERED) -> int:
    """Return the steps of the full budget."""
    return round(scale.tokens_per_parameter * parameters(study, width) / scale.tokens_of_a_step)


def model(study: Study, width: int, scale: Scale = REGISTERED) -> dict[str, Any]:
    """Return spec.model of the real phase."""
    common = {
        "layers": LAYERS[study],
        "hiddenSize": width,
        "vocabularySize": scale.vocabulary,
        "embeddings": "Tied",
        "attention": {"heads": width // scale.head_size},
        "sequenceLength": scale.sequence,
    }
    if study == "dense":
        return common | {"feedForward": {"size": 4 * width}}
    experts = {"type": "TopK", "count": 8, "topK": {"perToken": EXPERTS_PER_TOKEN, "auxiliaryLoss": "0.01"}}
    return common | {"feedForward": {"size": 2 * width, "activation": "SwiGLU"}, "experts": experts}
