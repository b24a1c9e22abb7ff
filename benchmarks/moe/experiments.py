"""Compared experiments: mixtures of experts on the same text, in the same sample order, with as many tokens. Pure."""

from dataclasses import dataclass, field
from typing import Any

from pseudoreal_api.spec.job import PseudoRealJob

SEEDS = (0, 1, 2)
STEPS = 250
PSEUDO_STEPS = 75
SEQUENCES = 16
LENGTH = 64
VALIDATION_SEQUENCES = 128
_RATE = "2e-3"
_WIDTH = 256
"""Total width of the MLP that a token passes through, in all models."""
_EXPERTS = 8
"""Parameters of all experts divided by the parameters that a token passes through."""


@dataclass(frozen=True)
class Experiment:
    name: str
    model: dict[str, Any]
    """Changes of the model's MLP."""
    pseudo: dict[str, Any] | None = None
    """Sharing in the first PSEUDO_STEPS steps; None for an experiment with one phase."""
    sharing: dict[str, Any] | None = field(default=None)
    """Sharing in the last phase."""


def _top_k(per_token: int) -> dict[str, Any]:
    top_k = {"perToken": per_token, "size": _WIDTH // per_token, "auxiliaryLoss": "0.01"}
    return {"experts": {"type": "TopK", "count": _EXPERTS * per_token, "topK": top_k}}


def _prototypes(number: int) -> dict[str, Any]:
    experts = {"count": _EXPERTS * number, "prototypes": number, "capacityFactor": "1.25"}
    return {"experts": experts, "feedForward": {"size": _WIDTH // number}}


DENSE = Experiment("dense", {})
MIXTURE = Experiment("2 prototypes", _prototypes(2))
ROUTINGS = [
    DENSE,
    Experiment("top 1", _top_k(1)),
    Experiment("top 2", _top_k(2)),
    MIXTURE,
    Experiment("4 prototypes", _prototypes(4)),
]
_BLOCKS, _ALONE = {"blocks": 1}, {"blocks": 1, "parts": ["Experts"]}
SHARINGS = [
    MIXTURE,
    Experiment("shared experts, then real", MIXTURE.model, pseudo=_ALONE),
    Experiment("shared blocks, then real", MIXTURE.model, pseudo=_BLOCKS),
    Experiment("shared experts to the end", MIXTURE.model, sharing=_ALONE),
    Experiment("shared blocks to the end", MIXTURE.model, sharing=_BLOCKS),
]
EXPERIMENTS = list({experiment.name: experiment for experiment in (*ROUTINGS, *SHARINGS)}.values())


def job(experiment: Experiment, seed: int, corpus: str) -> PseudoRealJob:
    common = {"batch": {"sequences": SEQUENCES}, "activations": {"keep": "All"}}
    phases = [{"name": "real", "until": {"step": STEPS}, **common}]
    if experiment.sharing is not None:
        phases[0]["sharing"] = experiment.sharing
    if experiment.pseudo is not None:
        phases.insert(0, {"name": "pseudo", "sharing": experiment.pseudo, "until": {"step": PSEUDO_STEPS}, **common})
    model = {
        "layers": 8,
        "hiddenSize": 64,
        "attention": {"heads": 2},
        "sequenceLength": LENGTH,
        "feedForward": {"size": _WIDTH},
    }
    spec = {
        "model": model | experiment.model,
        "data": {"path": corpus, "seed": seed, "validation": {"everySteps": 25, "sequences": VALIDATION_SEQUENCES}},
        "optimizer": {"learningRate": _RATE, "warmupSteps": 25, "beta2": "0.99"},
        "precision": {"compute": "float32"},
        "phases": phases,
        "delink": {"optimizerState": "Measured"},
        "checkpoint": {"everySteps": 100_000, "mode": "Sync"},
    }
    metadata = {"name": "moe", "uid": "moe"}
    body = {"apiVersion": "pseudoreal.dev/v1alpha1", "kind": "PseudoRealJob", "metadata": metadata, "spec": spec}
    return PseudoRealJob.from_object(body)
