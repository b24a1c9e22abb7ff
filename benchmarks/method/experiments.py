"""Compared experiments: jobs on the same text in the same sample order. Pure."""

from dataclasses import dataclass
from typing import Any, Literal

from pseudoreal_api.spec.job import PseudoRealJob

Regime = Literal["equal", "offload"]

SEEDS = (0, 1, 2)
STEPS = 400
"""Steps of a job in the regime of equal steps."""
RATE = "2e-3"
OTHER_RATES = ("1e-3", "4e-3")
OFFLOAD_STEPS = 150
"""Steps of the unshared job in the regime of offload."""
VALIDATION_SEQUENCES = 64

_REGIMES: dict[Regime, dict[str, Any]] = {
    "equal": {
        "model": {
            "layers": 12,
            "hiddenSize": 96,
            "attention": {"heads": 4},
            "sequenceLength": 64,
            "feedForward": {"size": 384},
        },
        "sequences": 16,
        "offload": {},
    },
    "offload": {
        "model": {
            "layers": 12,
            "hiddenSize": 384,
            "attention": {"heads": 4},
            "sequenceLength": 32,
            "feedForward": {"size": 1536},
        },
        "sequences": 2,
        "offload": {"home": "Disk"},
    },
}


def tokens_of_a_step(regime: Regime) -> int:
    return int(_REGIMES[regime]["sequences"] * _REGIMES[regime]["model"]["sequenceLength"])


def validation_bytes(regime: Regime) -> int:
    """Return the number of bytes over which each validation loss is averaged, the same in all experiments."""
    return int(VALIDATION_SEQUENCES * _REGIMES[regime]["model"]["sequenceLength"])


@dataclass(frozen=True)
class Pseudo:
    """A pseudo phase; experiments with equal pseudo phases share its training."""

    regime: Regime
    steps: int
    total_steps: int
    blocks: int = 1
    rate: str = RATE
    adaptive: str | None = None
    """Gradient correlation below which the phase ends, at `steps` at the latest; None: the phase ends at `steps`."""


@dataclass(frozen=True)
class Experiment:
    name: str
    regime: Regime = "equal"
    total_steps: int = STEPS
    rate: str = RATE
    pseudo: Pseudo | None = None
    """None for an experiment with a single phase."""
    shared: bool = False
    """True if the single phase is a pseudo phase with one block throughout: the effect of sharing without a
    real phase."""
    optimizer_state: str = "Measured"
    warmup_steps: int = 0
    """Warm-up steps after the delink."""
    seeds: tuple[int, ...] = SEEDS


def _at(share: float, **more: Any) -> Pseudo:
    return Pseudo("equal", round(STEPS * share), STEPS, **more)


_THIRTY = _at(0.3)
UNSHARED = Experiment("unshared")
SHARED = Experiment("shared throughout", shared=True)
POLICIES = [
    Experiment(f"30 %, {policy.lower()}", pseudo=_THIRTY, optimizer_state=policy)
    for policy in ("Measured", "Scale", "Copy", "Reset")
]
WARMED = [
    Experiment(f"30 %, {policy.lower()}, warmed up again", pseudo=_THIRTY, optimizer_state=policy, warmup_steps=25)
    for policy in ("Measured", "Reset")
]
NEVER_ENDED = Experiment("adaptive (0.5), measured", pseudo=_at(0.6, adaptive="0.5"), seeds=SEEDS[:1])
ADAPTIVE = Experiment("adaptive (0.99), measured", pseudo=_at(0.6, adaptive="0.99"))
SHARES = [
    Experiment("10 %, measured", pseudo=_at(0.1)),
    Experiment("60 %, measured", pseudo=_at(0.6)),
    NEVER_ENDED,
    ADAPTIVE,
]
BLOCKS = [Experiment(f"30 %, {blocks} blocks", pseudo=_at(0.3, blocks=blocks)) for blocks in (2, 4)]
RATES = [
    experiment
    for rate in OTHER_RATES
    for experiment in (
        Experiment(f"unshared, rate {rate}", rate=rate, seeds=SEEDS[:1]),
        Experiment(f"30 %, rate {rate}", rate=rate, pseudo=_at(0.3, rate=rate), seeds=SEEDS[:1]),
    )
]


def _offloaded(pseudo_steps: int, real_steps: int) -> Experiment:
    total = pseudo_steps + real_steps
    pseudo = Pseudo("offload", pseudo_steps, total, rate="1e-3") if pseudo_steps else None
    name = f"{pseudo_steps} pseudo + {real_steps} real" if pseudo_steps else "unshared, on disk"
    return Experiment(name, "offload", total, "1e-3", pseudo)


OFFLOADED = [
    _offloaded(0, OFFLOAD_STEPS),
    *(
        Experiment(f"shared throughout, {steps} steps", "offload", steps, "1e-3", shared=True)
        for steps in (OFFLOAD_STEPS, 2 * OFFLOAD_STEPS + OFFLOAD_STEPS // 2, 4 * OFFLOAD_STEPS)
    ),
    _offloaded(OFFLOAD_STEPS // 2, OFFLOAD_STEPS // 2),
    _offloaded(2 * OFFLOAD_STEPS, OFFLOAD_STEPS // 2),
    _offloaded(4 * OFFLOAD_STEPS, OFFLOAD_STEPS // 5),
]
EXPERIMENTS = [UNSHARED, SHARED, *POLICIES, *WARMED, *SHARES, *BLOCKS, *RATES, *OFFLOADED]


def job(experiment: Experiment, seed: int, corpus: str) -> PseudoRealJob:
    regime, pseudo = _REGIMES[experiment.regime], experiment.pseudo
    common = {"batch": {"sequences": regime["sequences"]}, "activations": {"keep": "All"}}
    last = {"until": {"step": experiment.total_steps}, **common}
    shared, real = {"name": "pseudo", "sharing": {"blocks": 1}}, {"name": "real", "offload": regime["offload"]}
    phases = [last | (shared if experiment.shared else real)]
    if pseudo is not None:
        until: dict[str, Any] = {"step": pseudo.steps}
        if pseudo.adaptive is not None:
            until["gradientCorrelation"] = {"below": pseudo.adaptive, "everySteps": 10}
        phases.insert(0, {"name": "pseudo", "sharing": {"blocks": pseudo.blocks}, "until": until, **common})
    spec = {
        "model": regime["model"],
        "data": {"path": corpus, "seed": seed, "validation": {"everySteps": 10, "sequences": VALIDATION_SEQUENCES}},
        "optimizer": {"learningRate": experiment.rate, "warmupSteps": 25, "beta2": "0.99"},
        "precision": {"compute": "float32"},
        "phases": phases,
        "delink": {"optimizerState": experiment.optimizer_state, "warmupSteps": experiment.warmup_steps},
        "checkpoint": {"everySteps": 100_000, "mode": "Sync"},
    }
    metadata = {"name": "method", "uid": "method"}
    body = {"apiVersion": "pseudoreal.dev/v1alpha1", "kind": "PseudoRealJob", "metadata": metadata, "spec": spec}
    return PseudoRealJob.from_object(body)
