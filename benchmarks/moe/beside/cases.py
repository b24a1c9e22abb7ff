"""Cases that all stacks train, and the job of our stack. Pure."""

from typing import Any, Literal

from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_api.spec.phase import StateSharding
from pydantic import BaseModel

from benchmarks.moe import jobs

RANKS = 2
LAYERS, HIDDEN, HEADS, LENGTH = 4, 128, 4, 128
EXPERT_SIZE, PER_TOKEN = 256, 2
SEQUENCES = 16
ROUNDS, WARM_UP, TIMED = 2, 2, 8

Compute = Literal["float32", "bfloat16"]


class Case(BaseModel, frozen=True):
    experts: int
    micro_batches: int
    compute: Compute

    @property
    def label(self) -> str:
        return f"{self.experts} experts, n = {self.micro_batches}"


CASES = [
    Case(experts=experts, micro_batches=micro_batches, compute=compute)
    for compute in ("float32", "bfloat16")
    for experts, micro_batches in ((16, 1), (16, 4))
]


def job(case: Case, sharding: StateSharding) -> PseudoRealJob:
    """Return the case as a job: top-2 SwiGLU experts without a capacity limit, as in the peers, with expert parallelism
    over all ranks."""
    model: dict[str, Any] = {
        "layers": LAYERS,
        "hiddenSize": HIDDEN,
        "attention": {"heads": HEADS},
        "sequenceLength": LENGTH,
        "feedForward": {"size": EXPERT_SIZE, "activation": "SwiGLU"},
        "experts": jobs.top_k(case.experts, PER_TOKEN, EXPERT_SIZE),
    }
    phase: dict[str, Any] = {
        "workers": RANKS,
        "batch": {"sequences": SEQUENCES, "microBatches": case.micro_batches},
        "parallelism": {"stateSharding": sharding, "expertRanks": RANKS},
        "activations": {"keep": "All"},
    }
    return PseudoRealJob.from_object(jobs.body(model, phase, case.compute))
