"""Checks of a layout against the budget of its phase and the machine: exact, and quick before a plan exists. Pure."""

from pseudoreal_api.resolved.config import PhaseConfig

from pseudoreal_trainer.estimate.time.hardware import HardwareProfile, Precision, pass_speed
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.memory.autograd_memory import autograd_memory_by_position
from pseudoreal_trainer.plan.memory.homes import Bounds, Peaks, budget_bounds, budget_violations, machine_violations
from pseudoreal_trainer.plan.memory.tiers import resident_bytes, unit_state
from pseudoreal_trainer.plan.sizes import Sizes


def violations(
    config: PhaseConfig, layout: Layout, sizes: Sizes, peaks: Peaks, profile: HardwareProfile | None
) -> list[str]:
    """Return one sentence for each limit, of the phase's budget or of the machine, that some rank exceeds. Empty if the
    layout fits. Raises ValueError if the profile lacks a figure that the phase needs."""
    reasons = budget_violations(layout, sizes, peaks, budget_bounds(config.offload.budget))
    if profile is not None:
        reasons += machine_violations(layout, sizes, peaks, room(layout, sizes, profile, config.precision.compute))
    return reasons


def room(layout: Layout, sizes: Sizes, profile: HardwareProfile, compute: Precision) -> Bounds:
    """Return the machine's memory available to a rank, without the bytes that kernels allocate for themselves."""
    device = profile.device_bytes
    if device is not None:
        device -= kernel_scratch(layout, sizes, profile, compute)
    return Bounds(device, profile.host_bytes)


def kernel_scratch(layout: Layout, sizes: Sizes, profile: HardwareProfile, compute: Precision) -> int:
    """Return the bytes that kernels allocate for themselves. Raises ValueError if the profile has no measurement in
    that precision."""
    tokens = sizes.max_tokens(layout)
    speed = pass_speed(profile.for_ranks(1), compute, sizes.model.hidden_size, tokens)
    graphs = autograd_memory_by_position(
        sizes, tokens, context_ranks=layout.context_ranks, tensor_ranks=layout.tensor_ranks
    )
    return round(speed.scratch_share * max(passes.block_backward for passes in graphs))


def least_state_fits(config: PhaseConfig, layout: Layout, sizes: Sizes, profile: HardwareProfile) -> bool:
    """Return True if the device can hold the resident state of a rank. A budget may move units: then only the weights
    and the gradient of the largest unit must fit, because both are on the device while the unit is used."""
    if profile.device_bytes is None:
        return True
    units = max((layout.local_units(rank) for rank in range(layout.pipeline)), key=len)
    if config.offload.budget is None:
        return sum(unit_state(layout, sizes, unit).device for unit in units) <= profile.device_bytes
    of_each = sizes.compute_bytes + sizes.master_bytes
    # Units of the same size and users are sharded alike.
    kinds = {(sizes.units[unit].numel, layout.pool_of(unit), len(layout.users[unit])): unit for unit in units}
    return max(sizes.whole(layout, unit) for unit in kinds.values()) * of_each <= profile.device_bytes


def state_fits(config: PhaseConfig, layout: Layout, sizes: Sizes, profile: HardwareProfile) -> bool:
    """Return True if the bytes that a rank holds through the whole step, without activations, fit the machine. Always
    True with a budget, which moves units."""
    if config.offload.budget is not None:
        return True
    machine = room(layout, sizes, profile, config.precision.compute)
    most = [resident_bytes(layout, sizes, rank) for rank in range(layout.pipeline)]
    return _is_within([m.device for m in most], machine.device) and _is_within([m.host for m in most], machine.host)


def activations_fit(config: PhaseConfig, layout: Layout, sizes: Sizes, peaks: Peaks, profile: HardwareProfile) -> bool:
    """Return True if the device bytes of activations alone fit the phase's budget and the machine."""
    bounds: list[Bounds] = [
        budget_bounds(config.offload.budget),
        room(layout, sizes, profile, config.precision.compute),
    ]
    return all(_is_within([peak.device for peak in peaks], bound.device) for bound in bounds)


def _is_within(needs: list[int], bound: int | None) -> bool:
    return bound is None or max(needs) <= bound
