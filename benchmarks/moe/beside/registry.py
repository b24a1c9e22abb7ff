"""All stacks by name, and the counterpart of each peer. A peer's packages are imported only when its stack
is called."""

from collections.abc import Mapping

from benchmarks.moe.beside import deepspeed_moe, ours, torchtitan_moe
from benchmarks.moe.beside.names import DEEPSPEED, FULL, GRADIENTS, TORCHTITAN
from benchmarks.moe.beside.stack import Stack

STACKS: Mapping[str, Stack] = {
    FULL: ours.sharded("Full"),
    GRADIENTS: ours.sharded("Gradients"),
    DEEPSPEED: deepspeed_moe.train,
    TORCHTITAN: torchtitan_moe.train,
}
