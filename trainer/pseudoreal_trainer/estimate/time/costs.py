"""Seconds of a plan's records, from a hardware profile or in units of a layer's forward pass. Pure."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from pseudoreal_api.spec.optimizer import MomentFormat

from pseudoreal_trainer.estimate.time.hardware import (
    HardwareProfile,
    Precision,
    TransferSpeed,
    collectives_for,
    pass_speed,
)
from pseudoreal_trainer.plan.effects import CARRIED, Group, Resource, Traffic, Transfer, transfers_of
from pseudoreal_trainer.plan.expert_parallel import units_accumulated
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.records import (
    Agree,
    Backward,
    Exchange,
    ExpertBackward,
    ExpertForward,
    Forward,
    Leg,
    Pass,
    Recompute,
    Record,
    Reduce,
    Route,
    Speculate,
    Update,
)
from pseudoreal_trainer.plan.sizes import Sizes, loss_chunk_length

_UPDATE_BYTES = 30
"""Bytes of memory that an update on the host moves for each element. A speculative update also copies weights and
moments."""
ROUNDING_ON_HOST: dict[MomentFormat, float] = {"Master": 1.0, "BFloat16": 2.2, "Float8": 5.0}
"""Time of an update with each format of moments, relative to an update of float32 moments, measured on two cores
(`python -m benchmarks.moments`): random bits and rounding cost more than the memory traffic that they save."""
ROUNDING_ON_GPU: dict[MomentFormat, float] = {
    "Master": 1.0,
    "BFloat16": (42 + 180) / 42,
    "Float8": (42 + 425) / 42,
}
"""The same on a GPU, where each of the 24 operations, 54 for blocks, moves its bytes: not measured."""

_HOST_FLOPS = 1e12
"""Floating-point operations per second of a rank's host, beside a GPU, if the profile has no figure: an eighth of a
machine with two processors."""

Load = Traffic | Literal["optimizer"]
"""Load of a step besides compute: a kind of traffic, or the optimizer's arithmetic."""


class Costs(Protocol):
    @property
    def overlaps(self) -> bool:
        """True if copies overlap compute; else copies are part of compute."""

    @property
    def cores(self) -> float | None:
        """Number of cores shared by the simulated ranks; None: no limit. A running task takes at most one core."""

    def seconds(self, record: Record, resource: Resource, /) -> float:
        """Return the seconds for which a record occupies one of its resources."""


@dataclass(frozen=True)
class UnitTime:
    """Costs in units of a layer's forward pass; everything between passes takes no time."""

    layout: Layout
    backward: float = 3.0
    """Time of a backward pass, including the recomputed forward pass, in forward passes of a layer."""
    overlaps: bool = True
    cores: float | None = None

    def seconds(self, record: Record, _: Resource, /) -> float:
        """Return the time of a pass: expert-parallel experts take half of their layer's time, and the sum of their
        outputs takes none."""
        if not isinstance(record, Pass) or not 0 < record.position < self.layout.head:
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
        self._tokens = sizes.max_tokens(layout)
        of_loss = sizes.loss_tokens(layout)
        self._chunks = -(-of_loss // loss_chunk_length(of_loss, layout.loss_chunk))
        self._passes = pass_speed(self._speeds, compute, sizes.model.hidden_size, self._tokens)
        spans = {self._span(group) for group in _collective_groups(layout)}
        self._collectives = {ranks: collectives_for(self._speeds, ranks) for ranks in spans - {1}}
        self._links: dict[Traffic, TransferSpeed] = {
            "h2d": self._speeds.h2d,
            "d2h": self._speeds.d2h,
            "disk_read": self._speeds.disk_read,
            "disk_write": self._speeds.disk_write,
            "pipeline": self._speeds.point_to_point,
            "experts": self._speeds.point_to_point,
        }

    def loads(self, record: Record) -> dict[Load, float]:
        """Return load -> seconds of a record: one entry per kind of traffic, and the optimizer's arithmetic."""
        sizes: Counter[Traffic] = Counter()
        speeds: dict[Traffic, TransferSpeed | None] = {}
        for transfer in transfers_of(self._layout, self._sizes, record):
            sizes[transfer.traffic] += transfer.size
            speeds[transfer.traffic] = self._links.get(transfer.traffic) or self._collective(transfer)
        loads: dict[Load, float] = {}
        for traffic, speed in speeds.items():
            # An exchange ends when the busiest rank has all of its rows.
            size = round(sizes[traffic] * self._imbalance) if isinstance(record, Exchange) else sizes[traffic]
            loads[traffic] = speed.seconds(size) if speed is not None else 0.0
        if isinstance(record, Update):
            loads["optimizer"] = self._optimizer(record.unit)
        elif isinstance(record, Speculate):
            loads["optimizer"] = self._optimizer(record.unit) + self._copy_of_state(record.unit)
        return loads

    def seconds(self, record: Record, resource: Resource, /) -> float:
        if isinstance(record, Pass):
            loads = self.loads(record)
            gathered = loads.get("context", 0.0) + loads.get("tensor", 0.0)
            return self._launches(record) + self._arithmetic(record) + self._accumulation(record) + gathered
        if isinstance(record, Agree):
            return self._speeds.agree_seconds
        loads = self.loads(record)
        # The norm of a reduced gradient is computed before the gradient is copied to its home.
        first = 0.0
        if isinstance(record, Reduce) and resource is Resource.REDUCTION:
            first = self._norm_and_rounding(record.unit)
        carried = sum((loads.get(traffic, 0.0) for traffic in CARRIED[resource]), first)
        # The chunks of an update are pipelined: one is updated while others are read and written.
        return max(loads.get("optimizer", 0.0), carried)

    def _launches(self, record: Pass) -> float:
        """Return the fixed seconds of a pass, independent of its number of tokens. A layer in chunks counts as one pass
        for each chunk and one for its keys and values."""
        return self._speeds.pass_seconds * (self._layout.sequence_chunks + 1 if self._is_in_chunks(record) else 1)

    def _is_in_chunks(self, record: Pass) -> bool:
        return self._layout.sequence_chunks > 1 and self._layout.is_dense(record.position)

    def _norm_and_rounding(self, unit: int) -> float:
        """Return the seconds in which a reduced gradient is rounded and its norm is computed, by the bytes that each
        reads and writes in the device's memory. Scratch memory stays in the cache. Without clipping, the norm tells
        whether the gradient is finite."""
        wide, elements = self._sizes.master_bytes, self._sizes.shard(self._layout, unit)
        of_rounding = 2 * wide if self._sizes.rounds_gradients else 0
        is_packed = self._sizes.rounds_gradients and self._layout.home(unit) != "Device"
        of_packing = wide + self._sizes.gradient_bytes if is_packed else 0
        return elements * (wide + of_rounding + of_packing) / self._speeds.memory_bytes_per_second

    def _collective(self, transfer: Transfer) -> TransferSpeed | None:
        """Return the speed of a collective; None if its group has only this rank."""
        assert transfer.group is not None, "bytes that stay on the rank move over a link"
        known = self._collectives.get(self._span(transfer.group))
        if known is None:
            return None
        match transfer.operation:
            case "all_gather":
                return known.all_gather
            case "reduce_scatter" | "all_to_all":  # both send the same bytes
                return known.reduce_scatter
        return known.all_reduce

    def _span(self, group: Group) -> int:
        """Return the number of consecutive ranks that a group spans; 1: the group is this rank alone. The number
        decides whether the group leaves a machine."""
        layout = self._layout
        match group.kind:
            case "data":
                return layout.data
            case "replicas":
                return layout.data if layout.replicas > 1 else 1
            case "context":
                return layout.sequence_ranks if layout.context_ranks > 1 else 1
            case "tensor":
                return layout.tensor_ranks
            case "holders":
                here = layout.data // layout.replicas if layout.fold_holders(group.fold) > layout.replicas else 1
                return (group.users[-1] - group.users[0]) * layout.data + here
        raise AssertionError(f"ranks of the group {group} exchange messages, and have no collectives of their own")

    def _optimizer(self, unit: int) -> float:
        speeds, on_device = self._speeds, self._layout.home(unit) == "Device"
        seconds = (
            speeds.update_on_device_seconds_per_element if on_device else speeds.update_on_host_seconds_per_element
        )
        is_on_gpu = on_device and self._sizes.device == "accelerator"
        factors = ROUNDING_ON_GPU if is_on_gpu else ROUNDING_ON_HOST
        elementwise = self._sizes.shard(self._layout, unit) * seconds * factors[self._sizes.moments]
        return elementwise + self._orthogonalization(unit)

    def _orthogonalization(self, unit: int) -> float:
        """Return the seconds of the products in which Muon orthogonalizes the unit's matrices."""
        if not self._sizes.uses_muon:
            return 0.0
        of_passes, on_host = self._passes.block_forward_flops_per_second, self._speeds.host_flops_per_second
        if not self.overlaps:
            speed = on_host or of_passes
        else:
            speed = of_passes if self._layout.home(unit) == "Device" else on_host or _HOST_FLOPS
        return self._sizes.units[unit].orthogonalization_flops / speed

    def _copy_of_state(self, unit: int) -> float:
        size = self._sizes.state_bytes(self._sizes.shard(self._layout, unit)) - self._sizes.omitted_state_bytes(unit)
        return self._speeds.update_on_host_seconds_per_element * size / _UPDATE_BYTES

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
        backward = 2 * flops / passes.block_backward_flops_per_second
        if again:
            left_out = self._sizes.unread_product_flops(self._tokens, position - 1)
            backward += forward - left_out / passes.block_forward_flops_per_second
        if self._is_in_chunks(record):
            # Keys and values are computed twice: before the chunks, and for the way back through them.
            of_keys = 4 * self._sizes.model.hidden_size * self._sizes.model.key_size * self._tokens
            backward += of_keys / passes.block_forward_flops_per_second
        return backward + self._selective_recomputation(record)

    def _selective_recomputation(self, record: Backward | ExpertBackward) -> float:
        """Return the seconds in which a backward pass computes the outputs of norms and of activation functions again.
        Each operation reads its operands and writes its result; nothing is multiplied by a matrix."""
        layout, model = self._layout, self._sizes.model
        if layout.keep != "Products":
            return 0.0
        # SiLU twice, once for its product with `up`; that product reads two tensors. GELU once.
        of_feature = 2 + 2 + 3 if model.feed_forward.activation == "SwiGLU" else 2
        has_experts = layout.has_experts(record.position)
        of_experts = of_feature * self._sizes.choices * model.expert.size if has_experts else 0
        if isinstance(record, ExpertBackward):
            accesses = of_experts * self._imbalance / layout.expert_groups
        else:
            of_norms = 0 if model.norm.placement == "Post" else 2 * 2 * model.hidden_size
            dense = model.shared_expert if has_experts else model.feed_forward
            of_dense = of_feature * dense.size if dense is not None else 0
            accesses = of_norms + of_dense + (0 if layout.spreads(record.position) else of_experts)
        return accesses * self._tokens * self._sizes.compute_bytes / self._speeds.memory_bytes_per_second

    def _flops(self, record: Pass) -> float:
        """Return the operations of the forward pass of the record's computation, on the busiest rank."""
        layout, flops = self._layout, self._sizes.pass_flops(self._tokens, record.position - 1)
        flops += self._sizes.repeated_key_flops(layout, self._tokens)
        if not layout.spreads(record.position):
            return flops
        of_experts = self._sizes.expert_flops(self._tokens)
        if isinstance(record, ExpertForward | ExpertBackward):
            return of_experts * self._imbalance / layout.expert_groups
        return flops - of_experts

    def _accumulation(self, record: Pass) -> float:
        """Return the seconds for adding a backward pass's gradients to the gradient accumulators of its units. Each
        addition reads two tensors and writes one. The head adds once per chunk of the loss; a layer in chunks adds once
        per chunk and once after the last."""
        elements = sum(self._sizes.units[unit].numel for unit in units_accumulated(self._layout, record))
        touched = elements * (self._sizes.compute_bytes + 2 * self._sizes.master_bytes)
        times = self._chunks if record.position == self._layout.head else 1
        if self._is_in_chunks(record):
            times = self._layout.sequence_chunks + 1
        return times * touched / self._speeds.memory_bytes_per_second


def _collective_groups(layout: Layout) -> Iterator[Group]:
    """Yield the group of every kind of collective that this layout can issue."""
    for unit in range(layout.units):
        yield Group("holders", layout.fold_of(unit), layout.users[unit])
    yield Group("replicas")
    yield Group("context")
    yield Group("tensor")
    if layout.balances_steps:
        yield Group("data")
