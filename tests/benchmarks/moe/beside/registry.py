"""All stacks by name, and what each is compared with. Nothing of the peers is imported before they are called."""

from collections.abc import Mapping

from tests.benchmarks.moe.beside import deepspeed_moe, ours, torchtitan_moe
from tests.benchmarks.moe.beside.names import DEEPSPEED, FULL, GRADIENTS, TORCHTITAN
from tests.benchmarks.moe.beside.stack import Stack

STACKS: Mapping[str, Stack] = {
    FULL: ours.sharded("Full"),
    GRADIENTS: ours.sharded("Gradients"),
    DEEPSPEED: deepspeed_moe.train,
    TORCHTITAN: torchtitan_moe.train,
}
