"""Budget violations: bytes by which a layout exceeds a budget or a machine. Pure."""

from pseudoreal_api.resolved.config import PhaseConfig

from pseudoreal_trainer.estimate.time.hardware import HardwareProfile, Precision, pass_speed
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.memory.graphs import graphs_by_position
from pseudoreal_trainer.plan.memory.homes import Bounds, Peaks, bounds_of, budget_shortfalls, machine_shortfalls
from pseudoreal_trainer.plan.sizes import Sizes


def shortfalls(
    config: PhaseConfig, layout: Layout, sizes: Sizes, peaks: Peaks, profile: HardwareProfile | None
) -> list[str]:
    """Return a sentence for each limit, of the phase's budget or of the machine, that some rank exceeds; empty if the
    layout fits. Raises ValueError if the profile lacks a figure that the phase needs."""
    reasons = budget_shortfalls(layout, sizes, peaks, bounds_of(config.offload.budget))
    if profile is not None:
        reasons += machine_shortfalls(layout, sizes, peaks, room(layout, sizes, profile, config.precision.compute))
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
    tokens = sizes.most_tokens(layout.data)
    speed = pass_speed(profile.for_ranks(1), compute, sizes.model.hidden_size, tokens)
    return round(speed.scratch_share * max(passes.block_backward for passes in graphs_by_position(sizes, tokens)))
