"""Speed and memory use of the first rank."""

import resource
from dataclasses import dataclass

import torch
from pseudoreal_api.resolved.config import PhaseConfig

from pseudoreal_trainer.data.documents import Counts
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.plan.memory.from_config import phase_sizes
from pseudoreal_trainer.plan.sizes import Sizes
from pseudoreal_trainer.plan.utilisation import peak_operations, step_operations
from pseudoreal_trainer.training.start import device_kind


@dataclass(frozen=True)
class Gauges:
    sizes: Sizes
    tokens: int
    """Tokens of one step, over all ranks."""
    ranks: int
    peak: float | None
    """Peak operations per second of the device in the compute type; None if unknown."""
    device: torch.device

    def operations(self, counted: Counts | None = None) -> float:
        """Return the floating-point operations of a training step per rank.

        `counted` are the step's document counts; None: attention spans whole sequences.
        """
        pairs = None if counted is None else counted.twice_the_pairs
        return step_operations(self.sizes, self.tokens, pairs) / self.ranks

    def teraflops_per_second(self, seconds: float, counted: Counts | None = None) -> float:
        """Return a rank's teraflops per second at `seconds` per step."""
        return self.operations(counted) / seconds / 1e12

    def utilisation(self, seconds: float, counted: Counts | None = None) -> float | None:
        """Return the achieved share of `peak` (MFU); None if `peak` is unknown."""
        return None if self.peak is None else self.operations(counted) / seconds / self.peak

    def device_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None

    def host_bytes(self) -> int:
        # ru_maxrss is in KiB on Linux.
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def phase_gauges(config: PhaseConfig, ranks: Ranks) -> Gauges:
    tokens = config.batch.sequences * config.model.sequence_length
    knows_peak = ranks.device.type == "cuda" and config.precision.compute == "bfloat16"
    peak = peak_operations(torch.cuda.get_device_name(ranks.device)) if knows_peak else None
    return Gauges(phase_sizes(config, device_kind(ranks)), tokens, config.ranks, peak, ranks.device)
