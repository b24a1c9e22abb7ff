"""What the first rank can say of its speed and its memory."""

import resource
from dataclasses import dataclass

import torch
from pseudoreal_api.resolved.config import PhaseConfig

from pseudoreal_trainer.data.documents import Counts
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.forecast.memory.from_config import phase_sizes
from pseudoreal_trainer.forecast.memory.sizes import Sizes
from pseudoreal_trainer.forecast.time.utilisation import peak_operations, step_operations
from pseudoreal_trainer.training.start import device_kind


@dataclass(frozen=True)
class Gauges:
    sizes: Sizes
    tokens: int
    """Tokens of a step."""
    ranks: int
    peak: float | None
    """Operations a second that the device can do in the type of the passes; None where that is not known."""
    device: torch.device

    def operations(self, counted: Counts | None = None) -> float:
        """Floating-point operations of a training step on each rank. `counted`: what the step's documents count; None:
        tokens attend in whole sequences."""
        pairs = None if counted is None else counted.twice_the_pairs
        return step_operations(self.sizes, self.tokens, pairs) / self.ranks

    def teraflops_per_second(self, seconds: float, counted: Counts | None = None) -> float:
        """The rate of a rank whose step takes `seconds`."""
        return self.operations(counted) / seconds / 1e12

    def utilisation(self, seconds: float, counted: Counts | None = None) -> float | None:
        """The same as a share of the peak."""
        return None if self.peak is None else self.operations(counted) / seconds / self.peak

    def device_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None

    def host_bytes(self) -> int:
        # Linux counts in KiB.
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def phase_gauges(config: PhaseConfig, ranks: Ranks) -> Gauges:
    tokens = config.batch.sequences * config.model.sequence_length
    knows_peak = ranks.device.type == "cuda" and config.precision.compute == "bfloat16"
    peak = peak_operations(torch.cuda.get_device_name(ranks.device)) if knows_peak else None
    return Gauges(phase_sizes(config, device_kind(ranks)), tokens, config.ranks, peak, ranks.device)
