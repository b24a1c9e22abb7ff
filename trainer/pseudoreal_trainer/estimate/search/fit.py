"""Quick tests for layouts that cannot fit, without a plan of a step or a choice of homes. Pure."""

from pseudoreal_api.resolved.config import PhaseConfig

from pseudoreal_trainer.estimate.shortfalls import room
from pseudoreal_trainer.estimate.time.hardware import HardwareProfile
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.memory.homes import Bounds, Peaks, bounds_of
from pseudoreal_trainer.plan.memory.tiers import held, unit_state
from pseudoreal_trainer.plan.sizes import Sizes


def least_state_fits(config: PhaseConfig, layout: Layout, sizes: Sizes, profile: HardwareProfile) -> bool:
    """Return True if the device can hold the resident state of a rank. With a budget, units may move: then only the
    weights and the gradient of the largest unit must fit, because both are on the device while the unit is used."""
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
    """Return True if a phase fits the machine before its first pass. Always True with a budget, which moves units."""
    if config.offload.budget is not None:
        return True
    machine = room(layout, sizes, profile, config.precision.compute)
    most = [held(layout, sizes, rank) for rank in range(layout.pipeline)]
    return _is_within([m.device for m in most], machine.device) and _is_within([m.host for m in most], machine.host)


def activations_fit(config: PhaseConfig, layout: Layout, sizes: Sizes, peaks: Peaks, profile: HardwareProfile) -> bool:
    """Return True if activations alone fit the phase's budget and the machine, wherever the state lives."""
    bounds: list[Bounds] = [bounds_of(config.offload.budget), room(layout, sizes, profile, config.precision.compute)]
    return all(_is_within([peak.device for peak in peaks], bound.device) for bound in bounds)


def _is_within(needs: list[int], bound: int | None) -> bool:
    return bound is None or max(needs) <= bound
