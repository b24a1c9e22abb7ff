"""Names of the stacks, and the stacks of each case. Pure."""

from collections.abc import Mapping

from benchmarks.moe.beside.cases import Case

FULL, GRADIENTS = "pseudoreal, fully sharded", "pseudoreal, gradients sharded"
DEEPSPEED, TORCHTITAN = "DeepSpeed's MoE, ZeRO-2", "torchtitan's MoE, fully_shard"
COUNTERPARTS: Mapping[str, str] = {DEEPSPEED: GRADIENTS, TORCHTITAN: FULL}
"""Peer -> our stack with the same kind of state sharding."""


def stacks_of(case: Case) -> list[str]:
    """Return the stacks of a case. torchtitan's experts always compute in bfloat16, so it is left out in float32."""
    return [FULL, GRADIENTS, DEEPSPEED, *([TORCHTITAN] if case.compute == "bfloat16" else [])]
