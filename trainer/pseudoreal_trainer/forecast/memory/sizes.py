"""What bytes depend on besides the layout. Pure."""

from dataclasses import dataclass
from typing import Literal

from pseudoreal_api.spec.model import Model

from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.units import Unit

Device = Literal["cpu", "cuda"]
"""Type of the device that trains, as torch names it."""

_COMPUTE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
_ALLOCATED = {"cpu": 1, "cuda": 512}
"""Bytes that allocations are multiples of: 1 on the CPU; on a GPU the smallest block of torch's caching allocator
(kMinBlockSize of CUDACachingAllocator, torch 2.11 to 2.15)."""


@dataclass(frozen=True)
class Sizes:
    model: Model
    units: tuple[Unit, ...]
    compute_bytes: int
    """Bytes of an element in the forward and backward pass."""
    master_bytes: int
    """Bytes of an element of a master weight, a moment or a gradient."""
    micro_batch: int
    """Sequences of a micro-batch, over all data ranks."""
    checkpoint_buffer: int = 0
    """Bytes through which checkpoints pass."""
    device: Device = "cpu"
    threads: int = 1
    """Number of threads of a rank, for one operation on the host."""

    @property
    def has_own_copies(self) -> bool:
        """Whether working copies differ in type from the master weights."""
        return self.compute_bytes != self.master_bytes

    def most_sequences(self, data_ranks: int) -> int:
        """Most sequences of a micro-batch on a data rank; see `stream.rank_parts`."""
        return -(-self.micro_batch // data_ranks)

    def most_tokens(self, data_ranks: int) -> int:
        """Most tokens of a micro-batch that a data rank takes as inputs."""
        return self.most_sequences(data_ranks) * self.model.sequence_length

    def allocated(self, size: int) -> int:
        """Bytes of the device that a tensor of `size` bytes takes."""
        unit = _ALLOCATED[self.device]
        return -(-size // unit) * unit

    def boundary(self, tokens: int) -> int:
        """Bytes of the device for what passes from position to position, [B, T, H]."""
        return self.allocated(self.boundary_on_host(tokens))

    def boundary_on_host(self, tokens: int) -> int:
        return tokens * self.model.hidden_size * self.compute_bytes

    def block_flops(self, tokens: int) -> int:
        """Floating-point operations of a block's forward pass: two for each weight of a matrix that a token meets, and
        attention to half of the tokens. With experts a token meets the router and one of each prototype, as if none
        were full."""
        model, experts = self.model, self.model.experts
        ffn = (3 if model.feed_forward.activation == "SwiGLU" else 2) * model.feed_forward.size
        met = ffn if experts is None else experts.count + experts.prototypes * ffn
        return 2 * tokens * model.hidden_size * (4 * model.hidden_size + met + model.sequence_length)

    def shard(self, layout: Layout, unit: int) -> int:
        """Number of elements of a unit's state on each rank that has a part of it."""
        return self.units[unit].shard_length(layout.shards)

    def whole(self, layout: Layout, unit: int) -> int:
        """Number of elements of all shards, with the padding behind the last."""
        return self.shard(layout, unit) * layout.shards


def compute_bytes(compute: str) -> int:
    return _COMPUTE_BYTES[compute]


def master_bytes(compute: str) -> int:
    """Bytes of an element of a master: float32, or float64 with float64."""
    return max(4, _COMPUTE_BYTES[compute])
