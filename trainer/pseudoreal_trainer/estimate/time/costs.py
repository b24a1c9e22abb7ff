"""Seconds of a plan's records, from a hardware profile or in units of a layer's forward pass. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from pseudoreal_trainer.estimate.time.hardware import HardwareProfile, Precision, Transfer, collectives_for, pass_speed
from pseudoreal_trainer.plan.chunks import loss_chunk_length
from pseudoreal_trainer.plan.expert_parallel import units_accumulated
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.records import (
    Agree,
    Backward,
    Count,
    Exchange,
    ExpertBackward,
    ExpertForward,
    Fetch,
    Forward,
    Leg,
    Pass,
    Read,
    Recompute,
    Record,
    Reduce,
    Route,
    Send,
    Stash,
    SumChoices,
    Unstash,
    Update,
)
from pseudoreal_trainer.plan.sizes import Sizes
from pseudoreal_trainer.plan.traffic import Traffic, moved

Load = Traffic | Literal["optimizer"]
"""Loads of a step besides compute."""


_Sent = Fetch | Reduce | Send | Agree | Count | SumChoices | Exchange
"""Records that use the network."""


class Costs(Protocol):
    @property
    def overlaps(self) -> bool:
        """True if copies overlap compute; else copies are part of compute."""

    @property
    def cores(self) -> float | None:
        """Number of cores shared by the simulated ranks; a running task takes at most one. None: enough for all."""

    def compute(self, record: Pass, /) -> float: ...

    def copy(self, record: Fetch | Stash | Unstash, /) -> float:
        """Return the seconds of a copy between device and host."""

    def read(self, record: Read, /) -> float: ...

    def network(self, record: _Sent, /) -> float: ...

    def settle(self, record: Reduce, /) -> float:
        """Return the seconds after the sum: copying the reduced gradient to its home, and computing its norm."""

    def update(self, record: Update, /) -> float: ...


@dataclass(frozen=True)
class UnitTime:
    """Costs in units of a layer's forward pass; everything between passes takes no time."""

    layout: Layout
    backward: float = 3.0
    """Time of a backward pass, including the recomputed forward pass."""
    overlaps: bool = True
    cores: float | None = None

    def compute(self, record: Pass, /) -> float:
        """Expert-parallel experts take half of their layer's time, and the sum of their outputs takes none."""
        if not 0 < record.position < self.layout.head:
            return 0.0
        again = 0.5 if self.layout.recompute else 0.0
        match record:
            case Route():
                return 0.5
            case ExpertForward():
                return 0.5 / self.layout.expert_groups
            case Recompute():
                return again
            case ExpertBackward():
                return self.backward / 2 / self.layout.expert_groups
            case Backward() if self.layout.spreads(record.position):
                return self.backward / 2 - again
            case Backward():
                return self.backward
            case Forward():
                return 0.0 if self.layout.spreads(record.position) else 1.0

    def copy(self, _: Fetch | Stash | Unstash, /) -> float:
        return 0.0

    def read(self, _: Read, /) -> float:
        return 0.0

    def network(self, _: _Sent, /) -> float:
        return 0.0

    def settle(self, _: Reduce, /) -> float:
        return 0.0

    def update(self, _: Update, /) -> float:
        return 0.0


class MeasuredCosts:
    """Costs in seconds on the hardware of a profile."""

    def __init__(
        self, profile: HardwareProfile, layout: Layout, sizes: Sizes, compute: Precision, imbalance: float = 1.0
    ) -> None:
        """`imbalance`: routed tokens of the experts of the busiest rank, as a multiple of the mean over the ranks.
        Raises ValueError if the profile lacks a figure that the phase needs."""
        self._layout, self._sizes, self._imbalance = layout, sizes, imbalance
        self._speeds = profile.for_ranks(layout.pipeline * layout.data)
        self.overlaps = profile.overlaps
        # One data rank per pipeline rank is simulated; the others do the same at the same time.
        self.cores = None if profile.overlaps else self._speeds.ranks / layout.data
        self._tokens = sizes.max_tokens(layout.data)
        self._chunks = -(-self._tokens // loss_chunk_length(self._tokens, layout.loss_chunk))
        self._passes = pass_speed(self._speeds, compute, sizes.model.hidden_size, self._tokens)
        spans = {self._span(record, traffic) for record, traffic in _collectives(layout)}
        self._collectives = {ranks: collectives_for(self._speeds, ranks) for ranks in spans - {1}}

    def loads(self, record: Record) -> dict[Load, float]:
        """Return the seconds of a record for each kind of traffic, and for the optimizer's arithmetic."""
        speeds: dict[Traffic, Transfer] = {
            "h2d": self._speeds.h2d,
            "d2h": self._speeds.d2h,
            "disk_read": self._speeds.disk_read,
            "disk_write": self._speeds.disk_write,
            "pipeline": self._speeds.point_to_point,
            "experts": self._speeds.point_to_point,
        }
        loads: dict[Load, float] = {}
        for traffic, size in moved(self._layout, self._sizes, record).items():
            speed = speeds[traffic] if traffic in speeds else self._collective(record, traffic)
            # An exchange ends when the busiest rank has all of its rows.
            busiest = round(size * self._imbalance) if isinstance(record, Exchange) else size
            loads[traffic] = speed.seconds(busiest) if speed is not None else 0.0
        if isinstance(record, Update):
            loads["optimizer"] = self._optimizer(record.unit)
        return loads

    def compute(self, record: Pass, /) -> float:
        return self._speeds.pass_seconds + self._arithmetic(record) + self._accumulation(record)

    def copy(self, record: Fetch | Stash | Unstash, /) -> float:
        loads = self.loads(record)
        return loads.get("h2d", 0.0) + loads.get("d2h", 0.0)

    def read(self, record: Read, /) -> float:
        return self.loads(record)["disk_read"]

    def network(self, record: _Sent, /) -> float:
        if isinstance(record, Agree):
            return self._speeds.agree_seconds
        loads = self.loads(record)
        if isinstance(record, Send):
            return loads["pipeline"]
        if isinstance(record, Count | Exchange):
            return loads["experts"]
        return loads["collective"] + loads.get("replicas", 0.0)

    def settle(self, record: Reduce, /) -> float:
        loads = self.loads(record)
        size = self._sizes.shard(self._layout, record.unit) * self._sizes.master_bytes
        norm = 0.0 if self._layout.clipping == "None" else size / self._speeds.memory_bytes_per_second
        return norm + loads["d2h"] + loads["disk_write"]

    def update(self, record: Update, /) -> float:
        loads = self.loads(record)
        # Chunks are pipelined: one is updated while others are read and written.
        return max(loads["optimizer"], loads.get("disk_read", 0.0) + loads.get("disk_write", 0.0))

    def _collective(self, record: Record, traffic: Traffic) -> Transfer | None:
        """Return the speed of the record's collective; None if its group has only this rank."""
        known = self._collectives.get(self._span(record, traffic))
        if known is None:
            return None
        if isinstance(record, Fetch):
            return known.all_gather
        is_split = isinstance(record, Reduce) and self._layout.shards(record.unit) > 1
        return known.reduce_scatter if is_split else known.all_reduce

    def _span(self, record: Record, traffic: Traffic) -> int:
        """Return the number of consecutive ranks that the collective's group spans, which decides whether it leaves a
        machine; 1: there is no collective."""
        layout = self._layout
        if isinstance(record, SumChoices):
            return layout.data
        assert isinstance(record, Fetch | Reduce), "only Fetch and Reduce have a group of the ranks that hold a unit"
        if traffic == "replicas":
            return layout.data if layout.replicas > 1 else 1
        users, of_replica = layout.users[record.unit], layout.data // layout.replicas
        here = of_replica if layout.data_holders(record.unit) > layout.replicas else 1
        return (users[-1] - users[0]) * layout.data + here

    def _optimizer(self, unit: int) -> float:
        speeds, on_device = self._speeds, self._layout.home(unit) == "Device"
        seconds = (
            speeds.update_on_device_seconds_per_element if on_device else speeds.update_on_host_seconds_per_element
        )
        return self._sizes.shard(self._layout, unit) * seconds

    def _arithmetic(self, record: Pass) -> float:
        layout, passes, position = self._layout, self._passes, record.position
        if position == 0:
            return self._sizes.boundary(self._tokens) / self._speeds.memory_bytes_per_second
        if position == layout.head:
            model = self._sizes.model
            return 6 * model.vocabulary_size * model.hidden_size * self._tokens / passes.head_flops_per_second
        flops = self._flops(record)
        forward = flops / passes.block_forward_flops_per_second
        match record:
            case Forward() if layout.spreads(position):
                # The sum over the experts' outputs reads all rows once.
                return self._sizes.exchange_bytes(self._tokens, Leg.COMBINE) / self._speeds.memory_bytes_per_second
            case Forward() | Route() | ExpertForward() | Recompute():
                return forward
        # A part that was recomputed by a Recompute record is not recomputed here.
        again = layout.recompute and not (isinstance(record, Backward) and layout.spreads(position))
        return 2 * flops / passes.block_backward_flops_per_second + (forward if again else 0.0)

    def _flops(self, record: Pass) -> float:
        """Return the operations of the forward pass of the record's computation, on the busiest rank."""
        flops, layout = self._sizes.pass_flops(self._tokens, record.position - 1), self._layout
        if not layout.spreads(record.position):
            return flops
        of_experts = self._sizes.expert_flops(self._tokens)
        if isinstance(record, ExpertForward | ExpertBackward):
            return of_experts * self._imbalance / layout.expert_groups
        return flops - of_experts

    def _accumulation(self, record: Pass) -> float:
        """Return the seconds in which a backward pass adds its parameters' gradients to the unit's gradient: two
        tensors are read, one is written; at the head, once per chunk of the loss."""
        elements = sum(self._sizes.units[unit].numel for unit in units_accumulated(self._layout, record))
        touched = elements * (self._sizes.compute_bytes + 2 * self._sizes.master_bytes)
        times = self._chunks if record.position == self._layout.head else 1
        return times * touched / self._speeds.memory_bytes_per_second


def _collectives(layout: Layout) -> Iterator[tuple[Record, Traffic]]:
    """Yield one example record for every kind of collective that this layout can issue."""
    for unit in range(layout.units):
        yield from ((Fetch(unit), "collective"), (Fetch(unit), "replicas"))
    if layout.balances_steps:
        yield SumChoices(0), "collective"
