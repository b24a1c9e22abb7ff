"""The interface of a sink, and the names of its figures."""

from collections.abc import Mapping
from typing import Protocol

from pseudoreal_api.wire.messages import ProgressReport

Figures = Mapping[str, float]
Texts = Mapping[str, str]


class Sink(Protocol):
    def log(self, step: int, figures: Figures, texts: Texts) -> None:
        """Log the figures and generated texts of a step. Steps come in ascending order."""

    def close(self) -> None:
        """Send the backlog."""


def texts_of(line: ProgressReport) -> Texts:
    """Return the generated samples of a line, each with its prompt, by name; empty if the line has no samples."""
    return {f"samples/{n}": f"{each.prompt}{each.text}" for n, each in enumerate(line.samples or [])}


def figures_of(line: ProgressReport) -> Figures:
    """Return the figures of a line of metrics.jsonl, under the names shown in metrics services."""
    cost = line.checkpoint
    known = {
        "train/loss": line.loss,
        "train/gradient_norm": line.gradient_norm,
        "train/learning_rate": line.learning_rate,
        "train/tokens": line.tokens,
        "train/skipped_steps": line.skipped_steps,
        "experts/load_max": line.expert_load_max,
        "experts/load_mean": line.expert_load_mean,
        "experts/idle": line.idle_experts,
        "experts/dropped": line.dropped_tokens,
        "experts/router_entropy": line.router_entropy,
        "experts/auxiliary_loss": line.auxiliary_loss,
        "validation/loss": line.validation_loss,
        "speed/tokens_per_second": line.tokens_per_second,
        "speed/teraflops_per_second": line.teraflops_per_second,
        "speed/mfu": line.mfu,
        "speed/waited_seconds": line.waited_seconds,
        "speed/data_seconds": line.data_seconds,
        "memory/device_bytes": line.device_bytes,
        "memory/host_bytes": line.host_bytes,
        "checkpoint/seconds": None if cost is None else cost.seconds,
        "checkpoint/stall_seconds": None if cost is None else cost.stall_seconds,
    }
    known |= {f"validation/{name}": loss for name, loss in (line.validation_losses or {}).items()}
    known |= {f"validation/{name}_bits_per_byte": bits for name, bits in (line.bits_per_byte or {}).items()}
    return {name: float(figure) for name, figure in known.items() if figure is not None}
