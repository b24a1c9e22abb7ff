"""Independent reference of the optimizer's tensor groups, as patterns of tensor names."""

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
    """Return the learning rate multiplier and the weight decay of a tensor."""
    (group,) = (group for group, pattern in PATTERNS.items() if re.search(pattern, name))
    found = [one for one in spec.multipliers if one.tensors == group]
    rate, factor = (float(found[0].learning_rate), float(found[0].weight_decay)) if found else (1.0, 1.0)
    is_still = group in ("Norms", "Biases") or group in spec.decay_exclusions
    return rate, 0.0 if is_still else float(spec.weight_decay) * factor
