"""Prototypes beside top-k with the same k: as many experts of the same size, and as many rows per token."""

from typing import Any

from pseudoreal_dev.machine.progress import progress

from benchmarks.moe import jobs
from benchmarks.moe.results import LOG, Taken
from benchmarks.moe.steps.turns import Asked, take

CHOICES = (1, 2, 4, 8)
"""Values of k."""
EXPERTS = 64
LAYERS, HIDDEN, LENGTH, SEQUENCES = 4, 128, 128, 32
ROWS = 1024
"""Total width of the k experts that a token passes through."""
CAPACITY = "1.25"
PROTOTYPES, TOP_K = "prototypes", "top k"
TURNS, STEPS = 5, 2


def bodies(choices: int) -> dict[str, dict[str, Any]]:
    size = ROWS // choices
    prototypes = {"count": EXPERTS, "prototypes": choices, "capacityFactor": CAPACITY}
    experts = {PROTOTYPES: prototypes, TOP_K: jobs.top_k(EXPERTS, choices, size)}
    return {name: _body(size, each) for name, each in experts.items()}


def _body(size: int, experts: dict[str, Any]) -> dict[str, Any]:
    model = {
        "layers": LAYERS,
        "hiddenSize": HIDDEN,
        "attention": {"heads": 4},
        "sequenceLength": LENGTH,
        "feedForward": {"size": size},
        "experts": experts,
    }
    return jobs.body(model, {"batch": {"sequences": SEQUENCES}, "activations": {"keep": "All"}})


def measure() -> dict[str, list[Taken]]:
    """Return the measurements by k."""
    found = dict[str, list[Taken]]()
    for choices in CHOICES:
        with progress.step(f"steps with k = {choices} by prototypes and by top k", log=LOG):
            found[str(choices)] = take(Asked(jobs=bodies(choices), turns=TURNS, steps=STEPS))
    return found
