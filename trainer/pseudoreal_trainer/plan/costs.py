"""Seconds of what the records of a plan do: as a hardware profile says, or in units of a layer's forward pass. Pure."""

from dataclasses import dataclass
from typing import Protocol

from pseudoreal_trainer.plan.hardware import HardwareProfile, Precision, collectives_for, pass_speed
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.links import moved
from pseudoreal_trainer.plan.sizes import Sizes
from pseudoreal_trainer.plan.steps import (
    Agree,
    Backward,
    Compute,
    Fetch,
    Read,
    Reduce,
    Send,
    Stash,
    Tie,
    Unstash,
    Update,
)
from pseudoreal_trainer.plan.units import VOCABULARY


class Costs(Protocol):
    overlaps: bool
    """Copies run beside compute; else they are part of it."""
    cores: float | None
    """That the simulated ranks share, one for each task at a time. None: enough."""

    def compute(self, step: Compute, /) -> float: ...

    def copy(self, step: Fetch | Stash | Unstash, /) -> float:
        """Between device and host."""

    def read(self, step: Read, /) -> float: ...

    def network(self, step: Fetch | Reduce | Send | Tie | Agree, /) -> float: ...

    def settle(self, step: Reduce, /) -> float:
        """What follows the sum: the way home of a reduced gradient, and its norm."""

    def update(self, step: Update, /) -> float: ...


@dataclass(frozen=True)
class UnitTime:
    """A layer's forward pass takes 1; everything between passes takes no time."""

    layout: Layout
    backward: float = 3.0
    """With the forward pass that recomputation repeats."""
    overlaps: bool = True
    cores: float | None = None

    def compute(self, step: Compute, /) -> float:
        if not 0 < step.position < self.layout.head:
            return 0.0
        return self.backward if isinstance(step, Backward) else 1.0

    def copy(self, _: Fetch | Stash | Unstash, /) -> float:
        return 0.0

    def read(self, _: Read, /) -> float:
        return 0.0

    def network(self, _: Fetch | Reduce | Send | Tie | Agree, /) -> float:
        return 0.0

    def settle(self, _: Reduce, /) -> float:
        return 0.0

    def update(self, _: Update, /) -> float:
        return 0.0


class MeasuredCosts:
    """On the hardware of a profile."""

    def __init__(self, profile: HardwareProfile, layout: Layout, sizes: Sizes, compute: Precision) -> None:
        """Raises ValueError when the profile lacks what the phase needs."""
        ranks = layout.pipeline * layout.data
        self._layout, self._sizes, self._speeds = layout, sizes, profile.for_ranks(ranks)
        self.overlaps = profile.overlaps
        # One data rank of each pipeline rank is simulated; the others do the same at the same time.
        self.cores = None if profile.overlaps else self._speeds.ranks / layout.data
        self._tokens = sizes.most_tokens(layout.data)
        self._passes = pass_speed(self._speeds, compute, sizes.model.hidden, self._tokens)
        self._collectives = collectives_for(self._speeds, layout.data) if layout.data > 1 else None

    def compute(self, step: Compute) -> float:
        return self._speeds.pass_seconds + self._arithmetic(step) + self._accumulation(step)

    def copy(self, step: Fetch | Stash | Unstash) -> float:
        bytes_ = moved(self._layout, self._sizes, step)
        return self._speeds.h2d.seconds(bytes_.get("h2d", 0)) + self._speeds.d2h.seconds(bytes_.get("d2h", 0))

    def read(self, step: Read) -> float:
        return self._speeds.disk_read.seconds(moved(self._layout, self._sizes, step)["disk_read"])

    def network(self, step: Fetch | Reduce | Send | Tie | Agree) -> float:
        bytes_ = moved(self._layout, self._sizes, step)
        match step:
            case Send():
                return self._speeds.point_to_point.seconds(bytes_["pipeline"])
            case Agree():
                return self._speeds.agree_seconds
            case Tie(unit):
                return collectives_for(self._speeds, len(self._layout.users[unit])).all_reduce.seconds(
                    bytes_["collective"]
                )
            case Fetch():
                return self._collectives.all_gather.seconds(bytes_["collective"]) if self._collectives else 0.0
        if self._collectives is None:
            return 0.0
        sum_ = self._collectives.reduce_scatter if self._layout.shards > 1 else self._collectives.all_reduce
        return sum_.seconds(bytes_["collective"])

    def settle(self, step: Reduce) -> float:
        bytes_ = moved(self._layout, self._sizes, step)
        reads = self._sizes.shard(self._layout, step.unit) * self._sizes.master_bytes
        norm = 0.0 if self._layout.clipping == "none" else reads / self._speeds.memory_bytes_per_second
        return norm + self._speeds.d2h.seconds(bytes_["d2h"]) + self._speeds.disk_write.seconds(bytes_["disk_write"])

    def update(self, step: Update) -> float:
        speeds, elements = self._speeds, self._sizes.shard(self._layout, step.unit)
        if self._layout.home(step.unit) == "device":
            return elements * speeds.update_on_device_seconds_per_element
        arithmetic = elements * speeds.update_on_host_seconds_per_element
        bytes_ = moved(self._layout, self._sizes, step)
        disk = speeds.disk_read.seconds(bytes_.get("disk_read", 0)) + speeds.disk_write.seconds(
            bytes_.get("disk_write", 0)
        )
        # Chunk by chunk: one is updated while others are read and written.
        return max(arithmetic, disk)

    def _arithmetic(self, step: Compute) -> float:
        layout, passes, position = self._layout, self._passes, step.position
        if position == 0:
            return self._sizes.boundary(self._tokens) / self._speeds.memory_bytes_per_second
        if position == layout.head:
            return 6 * VOCABULARY * self._sizes.model.hidden * self._tokens / passes.head_flops_per_second
        flops = self._sizes.block_flops(self._tokens)
        forward = flops / passes.block_forward_flops_per_second
        if not isinstance(step, Backward):
            return forward
        return 2 * flops / passes.block_backward_flops_per_second + (forward if layout.recompute else 0.0)

    def _accumulation(self, step: Compute) -> float:
        """A backward pass adds its parameters' gradients to the unit's: two are read, one is written."""
        if not isinstance(step, Backward):
            return 0.0
        elements = self._sizes.units[self._layout.unit_of(step.position)].numel
        touched = elements * (self._sizes.compute_bytes + 2 * self._sizes.master_bytes)
        return touched / self._speeds.memory_bytes_per_second
