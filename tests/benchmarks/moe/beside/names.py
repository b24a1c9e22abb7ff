"""Names of the stacks, and which trains what. Pure."""

from collections.abc import Mapping

from tests.benchmarks.moe.beside.cases import Case

FULL, GRADIENTS = "pseudoreal, fully sharded", "pseudoreal, gradients sharded"
DEEPSPEED, TORCHTITAN = "DeepSpeed's MoE, ZeRO-2", "torchtitan's MoE, fully_shard"
COUNTERPARTS: Mapping[str, str] = {DEEPSPEED: GRADIENTS, TORCHTITAN: FULL}
"""For each peer ours with as much of the state cut."""


def stacks_of(case: Case) -> list[str]:
    """torchtitan's experts compute in bfloat16 whatever the rest does, so it has no part in float32."""
    return [FULL, GRADIENTS, DEEPSPEED, *([TORCHTITAN] if case.compute == "bfloat16" else [])]
