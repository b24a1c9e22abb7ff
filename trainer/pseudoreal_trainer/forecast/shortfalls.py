"""What a layout needs more than a budget or a machine has. Pure."""

from pseudoreal_api.resolved.config import PhaseConfig

from pseudoreal_trainer.forecast.memory.graphs import graphs_by_position
from pseudoreal_trainer.forecast.memory.homes import Bounds, Peaks, bounds_of, budget_shortfalls, machine_shortfalls
from pseudoreal_trainer.forecast.memory.sizes import Sizes
from pseudoreal_trainer.forecast.time.hardware import HardwareProfile, Precision, pass_speed
from pseudoreal_trainer.plan.layout import Layout


def shortfalls(
    config: PhaseConfig, layout: Layout, sizes: Sizes, peaks: Peaks, profile: HardwareProfile | None
) -> list[str]:
    """A sentence for each bound of the phase's budget and of the machine that some rank exceeds; none where it fits.
    Raises ValueError when the profile lacks what the phase needs."""
    reasons = budget_shortfalls(layout, sizes, peaks, bounds_of(config.offload.budget))
    if profile is not None:
        reasons += machine_shortfalls(layout, sizes, peaks, room(layout, sizes, profile, config.precision.compute))
    return reasons


def room(layout: Layout, sizes: Sizes, profile: HardwareProfile, compute: Precision) -> Bounds:
    """What the machine has for a rank, without what kernels hold for themselves."""
    device = profile.device_bytes
    if device is not None:
        device -= kernel_scratch(layout, sizes, profile, compute)
    return Bounds(device, profile.host_bytes)


def kernel_scratch(layout: Layout, sizes: Sizes, profile: HardwareProfile, compute: Precision) -> int:
    """Bytes that kernels hold for themselves. Raises ValueError when nothing was measured in that precision."""
    tokens = sizes.most_tokens(layout.data)
    speed = pass_speed(profile.for_ranks(1), compute, sizes.model.hidden_size, tokens)
    return round(speed.scratch_share * max(passes.block_backward for passes in graphs_by_position(sizes, tokens)))
