"""The report of `pseudoreal plan` on a phase. The keys of its JSON are stable. Pure."""

from collections import Counter
from dataclasses import dataclass

from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.spec.phase import Home, StateSharding
from pydantic import BaseModel, ConfigDict

from pseudoreal_trainer.estimate.fit import kernel_scratch, violations
from pseudoreal_trainer.estimate.time.costs import Load, UnitTime
from pseudoreal_trainer.estimate.time.hardware import HardwareProfile
from pseudoreal_trainer.estimate.time.predict import idle_share, max_imbalance, predict, seconds_at_max_imbalance
from pseudoreal_trainer.estimate.time.timeline import Timeline, timeline
from pseudoreal_trainer.plan.check import check_plan
from pseudoreal_trainer.plan.effects import TRAFFIC, Traffic, traffic_bytes
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.lower import step_plan
from pseudoreal_trainer.plan.memory.from_config import fixed_layout, phase_sizes, placed_layout
from pseudoreal_trainer.plan.memory.homes import Peaks, activation_peaks
from pseudoreal_trainer.plan.memory.tiers import resident_bytes
from pseudoreal_trainer.plan.placement.flows import EXCHANGES, Exchange, Flow, bytes_between, flows_of
from pseudoreal_trainer.plan.records import Fetch, Plan, Reduce
from pseudoreal_trainer.plan.sizes import Device, Sizes, loss_chunk_length
from pseudoreal_trainer.plan.utilisation import peak_operations, step_operations


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True)


class TierBytes(_Model):
    device: int
    """Bytes held through the whole step: state, working copies, window and gradient buffers."""
    host: int
    """Bytes of state, of the buffers for updates, copies and checkpoints, and of the offloaded activations at their
    peak."""
    disk: int
    pinned: int
    """Bytes of `host` that are pinned for copies to and from a GPU. 0 without a GPU."""


class RankReport(_Model):
    """Bytes and traffic of a pipeline rank, the same for each of its data ranks."""

    parameters: int
    """Number of parameters whose state the rank holds."""
    bytes: TierBytes
    peak_device_bytes: int
    bytes_moved_per_step: dict[Traffic, int]


class ExchangeReport(_Model):
    """Traffic of one kind between all ranks of a phase. A ring of ranks is assumed to enter each worker once."""

    bytes_within_workers: int
    """Bytes per step between ranks of one worker."""
    bytes_between_workers: int
    """Bytes per step between workers, if consecutive ranks are on the same worker."""
    workers_together: int
    """Smallest number of consecutive workers that exchange nothing with other workers. If each such group of workers is
    placed close together, all traffic of this kind stays local."""


class ImbalanceReport(_Model):
    """Load imbalance of expert-parallel experts."""

    most_rows: float
    """Maximum number of routed tokens that the experts of one rank can get, as a multiple of the mean over the
    ranks."""
    step_seconds: float | None
    """Seconds of a step in which one rank gets this many routed tokens in every layer. null: no hardware profile was
    given."""


class PhaseReport(_Model):
    """The plan of a phase. Bytes are maxima over the ranks, except in `exchanges`, which has sums."""

    name: str
    parameters: int
    parameters_per_rank: int
    data_ranks: int
    context_ranks: int = 1
    """Number of context ranks: data ranks with different parts of the same sequences."""
    tensor_ranks: int = 1
    """Number of tensor ranks: data ranks with slices of the matrices of layers."""
    state_sharding: StateSharding
    """State that the data ranks split among them; the default if the job omits it."""
    bytes: TierBytes
    peak_device_bytes: int
    """Peak device bytes, including activations."""
    scratch_bytes: int | None
    """Bytes that kernels allocate for themselves while a pass runs, in addition to `peak_device_bytes`. null: no
    hardware profile was given."""
    bytes_moved_per_step: dict[Traffic, int]
    exchanges: dict[Exchange, ExchangeReport]
    """Kind of traffic between ranks -> its bytes. Kinds without bytes are omitted."""
    fetches_per_unit: int
    """Largest number of fetches of one unit by one rank in a step."""
    reductions_per_unit: int
    idle_share: float
    """Share of the step in which a pipeline rank waits, averaged over the ranks. Without a hardware profile, the
    backward pass of a layer takes as long as three forward passes with recomputation, or two without; everything else
    takes no time."""
    loss_chunk: int
    """Number of tokens per chunk of the loss on a rank. Logits are in memory for one chunk at a time."""
    tokens_per_step: int
    step_seconds: float | None
    """Predicted seconds of a step. Spread experts are assumed to get equally many routed tokens on each rank. null: no
    hardware profile was given."""
    teraflops_per_second: float | None
    """The model's floating-point operations per second on a rank, as in metrics.jsonl. null: no hardware profile was
    given."""
    mfu: float | None
    """Model FLOPs utilization: `teraflops_per_second` as a share of the device's bfloat16 peak. null: another compute
    type, no hardware profile, or a profile whose name contains no GPU with a known peak."""
    imbalance: ImbalanceReport | None
    """The worst case for `step_seconds`. null: experts are not spread."""
    tokens_to_hide: dict[Load, int]
    """Load that occurs once per step -> tokens per step above which compute takes longer than the load. Empty: no
    hardware profile was given."""
    bottleneck: str | None
    fits: bool
    reasons: list[str]
    hints: list[str]
    homes: dict[str, Home]
    ranks: list[RankReport]
    """One report per pipeline rank."""


@dataclass(frozen=True)
class PlannedPhase:
    report: PhaseReport
    layout: Layout
    flows: list[Flow]
    """Traffic between ranks in a step."""
    timeline: Timeline
    is_predicted: bool
    """True if times are in seconds; else they are in forward passes of a layer."""


def plan_phase(config: PhaseConfig, device: Device, profile: HardwareProfile | None, threads: int) -> PlannedPhase:
    """Plan a phase. `threads`: number of threads per rank. Raises ValueError if the profile lacks a figure that the
    phase needs."""
    sizes = phase_sizes(config, device, threads, profile.device_bytes if profile else None)
    peaks = activation_peaks(fixed_layout(config, sizes), sizes)
    layout = placed_layout(config, sizes, peaks)
    plan = step_plan(layout)
    check_plan(layout, plan)
    ranks, flows = _ranks(layout, sizes, plan, peaks), flows_of(layout, sizes, plan)
    prediction = predict(layout, sizes, profile, config.precision.compute) if profile else None
    line = prediction.timeline if prediction else timeline(layout, plan, unit_time(layout))
    reasons = violations(config, layout, sizes, peaks, profile)
    tokens = config.batch.sequences * config.model.sequence_length
    operations = step_operations(sizes, tokens) / config.ranks / prediction.timeline.seconds if prediction else None
    knows_peak = device == "accelerator" and config.precision.compute == "bfloat16"
    peak = peak_operations(profile.name) if profile and knows_peak else None
    report = PhaseReport(
        name=config.phase,
        parameters=sum(_parameters_of_all_ranks(layout, sizes, index) for index in range(len(sizes.units))),
        parameters_per_rank=max(rank.parameters for rank in ranks),
        data_ranks=layout.data,
        context_ranks=layout.context_ranks,
        tensor_ranks=layout.tensor_ranks,
        state_sharding=layout.sharding,
        bytes=TierBytes(**{tier: max(getattr(r.bytes, tier) for r in ranks) for tier in TierBytes.model_fields}),
        peak_device_bytes=max(rank.peak_device_bytes for rank in ranks),
        scratch_bytes=kernel_scratch(layout, sizes, profile, config.precision.compute) if profile else None,
        bytes_moved_per_step={
            traffic: max(rank.bytes_moved_per_step[traffic] for rank in ranks) for traffic in TRAFFIC
        },
        exchanges=_exchanges(flows, config.workers, config.processes_per_worker),
        fetches_per_unit=_most(plan, Fetch),
        reductions_per_unit=_most(plan, Reduce),
        idle_share=prediction.idle_share if prediction else idle_share(line, layout.pipeline),
        loss_chunk=loss_chunk_length(sizes.loss_tokens(layout), layout.loss_chunk),
        tokens_per_step=tokens,
        step_seconds=prediction.timeline.seconds if prediction else None,
        teraflops_per_second=None if operations is None else operations / 1e12,
        mfu=None if operations is None or peak is None else operations / peak,
        imbalance=_imbalance(config, layout, sizes, plan, profile),
        tokens_to_hide=prediction.tokens_to_hide if prediction else {},
        bottleneck=prediction.bottleneck if prediction else None,
        fits=not reasons,
        reasons=reasons,
        hints=_hints(layout),
        homes={_name(layout, sizes, unit): layout.home(unit) for unit in range(layout.units)},
        ranks=ranks,
    )
    return PlannedPhase(report, layout, flows, line, prediction is not None)


def _imbalance(
    config: PhaseConfig, layout: Layout, sizes: Sizes, plan: Plan, profile: HardwareProfile | None
) -> ImbalanceReport | None:
    if layout.expert_ranks == 1:
        return None
    seconds = seconds_at_max_imbalance(layout, sizes, plan, profile, config.precision.compute) if profile else None
    return ImbalanceReport(most_rows=max_imbalance(sizes, layout.expert_ranks), step_seconds=seconds)


def _parameters_of_all_ranks(layout: Layout, sizes: Sizes, unit: int) -> int:
    """Return the number of parameters of a unit: of the parts of all expert ranks, or of the slices of all tensor ranks
    and, once, the tensors that all of them have."""
    parts, own = layout.mesh.fold_size(layout.fold_of(unit)), sizes.units[unit]
    return parts * own.numel - (parts - 1) * sum(map(len, own.replicated))


def _name(layout: Layout, sizes: Sizes, unit: int) -> str:
    name = sizes.units[unit].name
    is_one_of_several = layout.expert_groups > 1 and layout.pool_of(unit) == "Experts"
    return f"{name}, group {layout.group_of(unit)}" if is_one_of_several else name


def unit_time(layout: Layout) -> UnitTime:
    return UnitTime(layout, backward=3.0 if layout.recompute else 2.0)


def _ranks(layout: Layout, sizes: Sizes, plan: Plan, peaks: Peaks) -> list[RankReport]:
    reports = []
    for rank, peak in enumerate(peaks):
        through, moved = resident_bytes(layout, sizes, rank), traffic_bytes(layout, sizes, plan[rank])
        most = through + peak
        reports.append(
            RankReport(
                parameters=sum(sizes.shard(layout, unit) for unit in layout.local_units(rank)),
                bytes=TierBytes(device=through.device, host=most.host, disk=most.disk, pinned=most.pinned),
                peak_device_bytes=most.device,
                bytes_moved_per_step={traffic: moved[traffic] for traffic in TRAFFIC},
            )
        )
    return reports


def _exchanges(flows: list[Flow], workers: int, processes: int) -> dict[Exchange, ExchangeReport]:
    between = bytes_between(flows, [rank // processes for rank in range(workers * processes)])
    found = {}
    for exchange in EXCHANGES:
        of_kind = [flow for flow in flows if flow.exchange == exchange]
        if total := sum(flow.bytes * len(flow.ranks) for flow in of_kind):
            found[exchange] = ExchangeReport(
                bytes_within_workers=total - between[exchange],
                bytes_between_workers=between[exchange],
                workers_together=_together(of_kind, workers, processes),
            )
    return found


def _together(flows: list[Flow], workers: int, processes: int) -> int:
    """Return the smallest divisor of the number of workers for which every flow stays inside a group of that many
    consecutive workers."""
    sizes = (size for size in range(1, workers + 1) if workers % size == 0)
    return next(
        size for size in sizes if all(len({rank // (size * processes) for rank in flow.ranks}) == 1 for flow in flows)
    )


def _most(plan: Plan, kind: type[Fetch] | type[Reduce]) -> int:
    counts = [Counter(record.unit for record in records if isinstance(record, kind)) for records in plan]
    return max((count for counter in counts for count in counter.values()), default=0)


def _hints(layout: Layout) -> list[str]:
    return [*_hints_on_groups(layout), *_hints_on_sharing(layout)]


def _hints_on_groups(layout: Layout) -> list[str]:
    if layout.expert_groups == 1 or not any(map(layout.asks_for_groups, range(layout.head))):
        return []
    slots = max(layout.slots(rank, "Experts") for rank in range(layout.pipeline))
    return [
        f"a rank's experts of a layer are {layout.expert_groups} units, and the device has room for the working"
        f" copies of {slots} that move; bytes and seconds assume that tokens come for all of these units; in a"
        " step, a unit without tokens is not fetched"
    ]


def _hints_on_sharing(layout: Layout) -> list[str]:
    """Return hints on shared blocks in a pipeline."""
    if layout.pipeline == 1 or not any(map(layout.shares, range(1, layout.head))):
        return []
    if not layout.common_layer_units:
        return ["each shared block is used on one pipeline rank only: its gradient needs no sum over pipeline ranks"]
    multiples = range(layout.pipeline, layout.layers, layout.pipeline)
    free = [str(blocks) for blocks in multiples if layout.layers % blocks == 0]
    summed = f"the gradients of {layout.common_layer_units} shared blocks are summed over pipeline ranks in every step"
    if not free:
        return [summed]
    return [
        f"{summed}; pattern cycle with a number of blocks that is a multiple of parallelism.pipeline"
        f" {layout.pipeline} (here {', '.join(free)}) and schedule Layered needs no sum"
    ]
