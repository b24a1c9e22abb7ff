"""The facts that determine a model's weights and its function, as fields of spec.model with every default filled in.
Two models with the same facts compute the same function of the same weights."""

from collections.abc import Mapping, Sequence
from typing import Any

from pseudoreal_api.spec.model import MixtureOfExperts, Model

from pseudoreal_trainer.convert.rotary import rotary_facts, rotary_parameters

Facts = dict[str, Any]
"""Path of a field below spec.model -> value."""


def facts_of(model: Model) -> Facts:
    attention, norm, feed_forward = model.attention, model.norm, model.feed_forward
    facts = {
        "layers": model.layers,
        "hiddenSize": model.hidden_size,
        "vocabularySize": model.vocabulary_size,
        "embeddings": model.embeddings,
        "logitSoftCap": model.logit_soft_cap,
        "attention.heads": attention.heads,
        "attention.keyValueHeads": attention.key_value_heads or attention.heads,
        "attention.headSize": model.head_size,
        "attention.bias": attention.bias,
        "attention.queryKeyNorm": attention.query_key_norm,
        "norm.placement": norm.placement,
        "norm.epsilon": float(norm.epsilon),
        "feedForward.activation": feed_forward.activation,
        "feedForward.bias": feed_forward.bias,
    }
    facts |= windows([model.window_of(layer) for layer in range(model.layers)])
    facts |= rotary_facts(rotary_parameters(attention.rotary))
    dense = [layer for layer in range(model.layers) if not model.has_experts(layer)]
    if dense:
        facts["feedForward.size"] = feed_forward.size
    return facts | ({} if model.experts is None else _experts(model, model.experts, dense))


def windows(sizes: Sequence[int | None]) -> Facts:
    """Return the facts about attention windows. `sizes`: window of each layer; None: all earlier tokens."""
    used = sorted({size for size in sizes if size is not None})
    layers = [layer for layer, size in enumerate(sizes) if size is not None]
    if not used:
        return {}
    return {"attention.window.size": used[0] if len(used) == 1 else used, "attention.window.layers": layers}


def differences(ours: Facts, theirs: Facts) -> list[str]:
    """Return one clause per field that differs."""
    return [
        f"spec.model.{field} is {_value(ours, field)} and theirs is {_value(theirs, field)}"
        for field in sorted({*ours, *theirs})
        if ours.get(field) != theirs.get(field)
    ]


def _value(facts: Mapping[str, Any], field: str) -> str:
    value = facts.get(field)
    return "not set" if value is None else str(value)


def _experts(model: Model, experts: MixtureOfExperts, dense: list[int]) -> Facts:
    facts: Facts = {"experts.type": experts.type, "experts.count": experts.count, "experts.denseLayers": dense}
    if experts.top_k is None:
        return facts | {"experts.prototypes": experts.prototypes, "feedForward.size": model.feed_forward.size}
    top_k = experts.top_k
    return facts | {
        "experts.topK.perToken": top_k.per_token,
        "experts.topK.size": model.expert.size,
        "experts.topK.score": top_k.score,
        "experts.topK.weights": top_k.weights,
        "experts.topK.scale": float(top_k.scale),
        "experts.topK.sharedExperts": top_k.shared_experts,
    }
