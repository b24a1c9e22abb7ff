"""Groups of tensors by patterns of their names, written down apart from the trainer's own."""

import re

from pseudoreal_api.spec.optimizer import Optimizer

PATTERNS = {
    "Embedding": r"^embedding\.weight$",
    "Head": r"^head\.weight$",
    "Attention": r"\.attention\.(query|key|value|output)\.weight$",
    "FeedForward": r"\.ffn\.(gate|up|down)\.weight$",
    "Experts": r"\.(experts|shared)\.(gate|up|down)\.weight$",
    "Router": r"\.router\.weight$",
    "Norms": r"(^|[._])norm\.weight$",
    "Biases": r"\.bias$",
}


def figures_of(name: str, spec: Optimizer) -> tuple[float, float]:
    """What a tensor's learning rate is multiplied by, and its weight decay."""
    (group,) = (group for group, pattern in PATTERNS.items() if re.search(pattern, name))
    found = [one for one in spec.multipliers if one.tensors == group]
    rate, factor = (float(found[0].learning_rate), float(found[0].weight_decay)) if found else (1.0, 1.0)
    is_still = group in ("Norms", "Biases") or group in spec.decay_exclusions
    return rate, 0.0 if is_still else float(spec.weight_decay) * factor
