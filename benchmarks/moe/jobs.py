"""Jobs with mixtures of experts, for timing their steps. Pure."""

from typing import Any

from benchmarks.work import BETAS, LEARNING_RATE, WEIGHT_DECAY

SEED = 7


def top_k(count: int, per_token: int, size: int) -> dict[str, Any]:
    return {"type": "TopK", "count": count, "topK": {"perToken": per_token, "size": size}}


def body(model: dict[str, Any], phase: dict[str, Any], compute: str = "float32") -> dict[str, Any]:
    """Return a job with one phase, longer than any measurement; AdamW with the constants of all benchmarks, without
    clipping."""
    spec = {
        "model": model,
        "data": {"path": "none", "seed": SEED},
        "optimizer": {
            "learningRate": str(LEARNING_RATE),
            "beta1": str(BETAS[0]),
            "beta2": str(BETAS[1]),
            "weightDecay": str(WEIGHT_DECAY),
            "clipping": {"mode": "None"},
        },
        "precision": {"compute": compute},
        "phases": [{"name": "real", "until": {"step": 1000}, **phase}],
    }
    metadata = {"name": "moe", "uid": "moe"}
    return {"apiVersion": "pseudoreal.dev/v1alpha1", "kind": "PseudoRealJob", "metadata": metadata, "spec": spec}
