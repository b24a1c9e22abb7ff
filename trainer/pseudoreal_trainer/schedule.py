"""The learning rate as a function of the step, counted from the job's start over all phases. Pure."""

from math import cos, pi

from pseudoreal_api.model_spec import Optimizer


def learning_rate(optimizer: Optimizer, step: int, total_steps: int) -> float:
    """Rate of the update that makes step `step` (the first is 1): linear warm-up, then decay to the final fraction."""
    peak, warmup = float(optimizer.learning_rate), optimizer.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    final = float(optimizer.final_fraction)
    return peak * (final + (1.0 - final) * _remaining(optimizer.schedule, progress))


def _remaining(schedule: str, progress: float) -> float:
    if schedule == "constant":
        return 1.0
    return (1.0 + cos(pi * progress)) / 2 if schedule == "cosine" else 1.0 - progress
