"""Learning rate as a function of the step, counted from the start of the job over all phases. Pure."""

from math import cos, pi

from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.spec.optimizer import Optimizer


def phase_rate(config: PhaseConfig, step: int, begin: int) -> float:
    """Return the learning rate of step `step`, including the warm-up of a phase started at step `begin`."""
    rate = learning_rate(config.optimizer, step, config.total_steps)
    return rate * min(1.0, (step - begin) / config.warmup_steps) if config.warmup_steps else rate


def learning_rate(optimizer: Optimizer, step: int, total_steps: int) -> float:
    """Return the learning rate of step `step` (the first is 1): linear warm-up, then decay to the final fraction."""
    peak, warmup = float(optimizer.learning_rate), optimizer.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    final = float(optimizer.final_fraction)
    return peak * (final + (1.0 - final) * _remaining(optimizer, step - warmup, max(1, total_steps - warmup)))


def _remaining(optimizer: Optimizer, done: int, steps: int) -> float:
    """Return the remaining share of the decay after `done` of the `steps` after the warm-up."""
    progress = min(1.0, done / steps)
    match optimizer.schedule:
        case "Constant":
            return 1.0
        case "Linear":
            return 1.0 - progress
        case "Cosine":
            return (1.0 + cos(pi * progress)) / 2
        case "WarmupStableDecay":
            return min(1.0, (1.0 - progress) / float(optimizer.decay_fraction))
