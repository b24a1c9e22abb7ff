"""Seconds of what the records of a plan do: as a hardware profile says, or in units of a layer's forward pass. Pure."""

from dataclasses import dataclass
from typing import Literal, Protocol

from pseudoreal_trainer.forecast.memory.sizes import Sizes
from pseudoreal_trainer.forecast.time.hardware import HardwareProfile, Precision, Transfer, collectives_for, pass_speed
from pseudoreal_trainer.forecast.time.links import Link, moved
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.steps import (
    Agree,
    Backward,
    Compute,
    Fetch,
    Read,
    Reduce,
    Send,
    Stash,
    Step,
    Tie,
    Unstash,
    Update,
)
from pseudoreal_trainer.plan.units import VOCABULARY

Load = Link | Literal["optimizer"]
"""What takes time in a step besides compute."""


class Costs(Protocol):
    @property
    def overlaps(self) -> bool:
        """Whether copies run beside compute; else they are part of it."""

    @property
    def cores(self) -> float | None:
        """Number of cores that the simulated ranks share, one for each task at a time. None: enough."""

    def compute(self, step: Compute, /) -> float: ...

    def copy(self, step: Fetch | Stash | Unstash, /) -> float:
        """Seconds of a copy between device and host."""

    def read(self, step: Read, /) -> float: ...

    def network(self, step: Fetch | Reduce | Send | Tie | Agree, /) -> float: ...

    def settle(self, step: Reduce, /) -> float:
        """Seconds of what follows the sum: the way home of a reduced gradient, and its norm."""

    def update(self, step: Update, /) -> float: ...


@dataclass(frozen=True)
class UnitTime:
    """Costs in units of a layer's forward pass; everything between passes takes no time."""

    layout: Layout
    backward: float = 3.0
    """Time of a backward pass, with the forward pass that recomputation repeats."""
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
    """Costs in seconds on the hardware of a profile."""

    def __init__(self, profile: HardwareProfile, layout: Layout, sizes: Sizes, compute: Precision) -> None:
        """Raises ValueError when the profile lacks what the phase needs."""
        self._layout, self._sizes = layout, sizes
        self._speeds = profile.for_ranks(layout.pipeline * layout.data)
        self.overlaps = profile.overlaps
        # One data rank of each pipeline rank is simulated; the others do the same at the same time.
        self.cores = None if profile.overlaps else self._speeds.ranks / layout.data
        self._tokens = sizes.most_tokens(layout.data)
        self._passes = pass_speed(self._speeds, compute, sizes.model.hidden_size, self._tokens)
        groups = {layout.data, *map(len, layout.users)} - {1}
        self._collectives = {ranks: collectives_for(self._speeds, ranks) for ranks in groups}

    def loads(self, step: Step) -> dict[Load, float]:
        """Seconds of a record on each link, and of the optimizer's arithmetic."""
        speeds: dict[Link, Transfer] = {
            "h2d": self._speeds.h2d,
            "d2h": self._speeds.d2h,
            "disk_read": self._speeds.disk_read,
            "disk_write": self._speeds.disk_write,
            "pipeline": self._speeds.point_to_point,
        }
        loads: dict[Load, float] = {}
        for link, size in moved(self._layout, self._sizes, step).items():
            speed = self._collective(step) if link == "collective" else speeds[link]
            loads[link] = speed.seconds(size) if speed is not None else 0.0
        if isinstance(step, Update):
            loads["optimizer"] = self._optimizer(step.unit)
        return loads

    def compute(self, step: Compute, /) -> float:
        return self._speeds.pass_seconds + self._arithmetic(step) + self._accumulation(step)

    def copy(self, step: Fetch | Stash | Unstash, /) -> float:
        loads = self.loads(step)
        return loads.get("h2d", 0.0) + loads.get("d2h", 0.0)

    def read(self, step: Read, /) -> float:
        return self.loads(step)["disk_read"]

    def network(self, step: Fetch | Reduce | Send | Tie | Agree, /) -> float:
        if isinstance(step, Agree):
            return self._speeds.agree_seconds
        if isinstance(step, Tie):
            return self._tie(step)
        return self.loads(step)["pipeline" if isinstance(step, Send) else "collective"]

    def settle(self, step: Reduce, /) -> float:
        loads = self.loads(step)
        size = self._sizes.shard(self._layout, step.unit) * self._sizes.master_bytes
        norm = 0.0 if self._layout.clipping == "None" else size / self._speeds.memory_bytes_per_second
        return norm + loads["d2h"] + loads["disk_write"]

    def update(self, step: Update, /) -> float:
        loads = self.loads(step)
        # Chunk by chunk: one is updated while others are read and written.
        return max(loads["optimizer"], loads.get("disk_read", 0.0) + loads.get("disk_write", 0.0))

    def _tie(self, step: Tie) -> float:
        """Seconds of a tie. The sum goes over the devices' network: a gradient that is kept elsewhere passes through
        the device."""
        loads, size = self.loads(step), self._sizes.shard(self._layout, step.unit) * self._sizes.master_bytes
        through = 0.0
        if self.overlaps and self._layout.home(step.unit) != "Device":
            through = self._speeds.h2d.seconds(size) + self._speeds.d2h.seconds(size)
        return loads["collective"] + loads["disk_read"] + loads["disk_write"] + through

    def _collective(self, step: Step) -> Transfer | None:
        """The speed of the record's collective; None: this rank is alone."""
        ranks = len(self._layout.users[step.unit]) if isinstance(step, Tie) else self._layout.data
        known = self._collectives.get(ranks)
        if known is None:
            return None
        if isinstance(step, Fetch):
            return known.all_gather
        return known.reduce_scatter if isinstance(step, Reduce) and self._layout.shards > 1 else known.all_reduce

    def _optimizer(self, unit: int) -> float:
        speeds, on_device = self._speeds, self._layout.home(unit) == "Device"
        seconds = (
            speeds.update_on_device_seconds_per_element if on_device else speeds.update_on_host_seconds_per_element
        )
        return self._sizes.shard(self._layout, unit) * seconds

    def _arithmetic(self, step: Compute) -> float:
        layout, passes, position = self._layout, self._passes, step.position
        if position == 0:
            return self._sizes.boundary(self._tokens) / self._speeds.memory_bytes_per_second
        if position == layout.head:
            return 6 * VOCABULARY * self._sizes.model.hidden_size * self._tokens / passes.head_flops_per_second
        flops = self._sizes.block_flops(self._tokens)
        forward = flops / passes.block_forward_flops_per_second
        if not isinstance(step, Backward):
            return forward
        return 2 * flops / passes.block_backward_flops_per_second + (forward if layout.recompute else 0.0)

    def _accumulation(self, step: Compute) -> float:
        """Seconds in which a backward pass adds its parameters' gradients to the unit's: two are read, one is
        written."""
        if not isinstance(step, Backward):
            return 0.0
        elements = self._sizes.units[self._layout.unit_of(step.position)].numel
        touched = elements * (self._sizes.compute_bytes + 2 * self._sizes.master_bytes)
        return touched / self._speeds.memory_bytes_per_second
