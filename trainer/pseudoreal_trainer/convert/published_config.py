"""The meaning of a `transformers` config.json in fields of spec.model.

A missing entry has the default of the configuration class of its model_type (transformers 5.23,
models/*/configuration_*.py). These defaults differ from published files and from our defaults. Unknown entries are
rejected: they may change the function of the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pseudoreal_api.spec.model import Placement, QueryKeyNorm

from pseudoreal_trainer.convert.config_entries import ConfigEntries
from pseudoreal_trainer.convert.facts import Facts, windows
from pseudoreal_trainer.convert.rotary import join_parameters, rotary_facts
from pseudoreal_trainer.errors import UnfitWeights

Json = dict[str, Any]

_SAYS_NOTHING = {
    *("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache"),
    *("initializer_range", "pretraining_tp", "max_position_embeddings", "max_window_layers", "model_type"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "output_router_logits", "router_aux_loss_coef"),
}
"""Entries that do not affect the function of the model."""

_FIXED = {"hidden_act": "silu", "attention_dropout": 0, "router_jitter_noise": 0, "use_mrope": False}
"""Entries for which only one value is supported."""


@dataclass(frozen=True)
class _Kind:
    """Properties common to all models of a model_type, and the defaults of its configuration class."""

    bias: Literal["Entry", "QueryKeyValue", "None"]
    """Entry: all projections of attention have a bias if attention_bias is set. QueryKeyValue: the projections of
    queries, keys and values always have a bias. None: no projection has a bias."""
    positions: int
    """Default of max_position_embeddings."""
    query_key_norm: QueryKeyNorm = "None"
    placement: Placement = "Pre"
    key_value_heads: int | None = None
    head_size: int | None = None
    epsilon: float = 1e-6
    base: float = 10_000.0
    window: Literal["None", "Always", "Switched", "ByLayer"] = "None"
    """Always: sliding_window in every layer. Switched: in every layer, if use_sliding_window is set. ByLayer: in some
    layers, if use_sliding_window is set."""
    window_size: int | None = 4096
    has_mlp_bias: bool = False
    """True if the model_type has the entry mlp_bias: whether the MLP's matrices have a bias."""
    experts: Literal["None", "Mixtral", "Qwen3MoE"] = "None"


KINDS: Mapping[str, _Kind] = {
    "llama": _Kind("Entry", 2048, has_mlp_bias=True),
    "mistral": _Kind("None", 131_072, key_value_heads=8, window="Always"),
    "qwen2": _Kind("QueryKeyValue", 32_768, key_value_heads=32, window="ByLayer"),
    "qwen3": _Kind("Entry", 32_768, "PerHead", key_value_heads=32, head_size=128, window="ByLayer"),
    "olmo2": _Kind("Entry", 2048, "AllHeads", "Post", epsilon=1e-5),
    "mixtral": _Kind(
        "None", 131_072, key_value_heads=8, epsilon=1e-5, base=1e6, window="Always", window_size=None, experts="Mixtral"
    ),
    "qwen3_moe": _Kind("Entry", 32_768, "PerHead", key_value_heads=4, window="Switched", experts="Qwen3MoE"),
}


def published_facts(config: Json) -> Facts:
    """Return the facts of the model. Raises UnfitWeights."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in KINDS:
        raise UnfitWeights(
            f"config.json has the model_type {model_type}; those that can be read are {', '.join(KINDS)}"
        )
    try:
        return _facts(model_type, ConfigEntries(config))
    except (AttributeError, TypeError) as error:
        raise UnfitWeights(f"config.json has an entry of another type than a {model_type} has: {error}") from error


def trained_length(config: Json) -> int:
    """Return the longest sequence in tokens for which the weights are meant: the length to which their rotary scaling
    stretches positions, or max_position_embeddings if larger. `config`: accepted by `published_facts`."""
    kind, entries = KINDS[config["model_type"]], ConfigEntries(config)
    rotary = join_parameters(entries, kind.base)
    stretched = rotary.get("factor", 0) * rotary.get("original_max_position_embeddings", 0)
    return max(entries.integer("max_position_embeddings", kind.positions), int(stretched))


def _facts(model_type: str, entries: ConfigEntries) -> Facts:
    kind = KINDS[model_type]
    layers = entries.integer("num_hidden_layers")
    facts = _shape(entries, kind, layers)
    facts |= windows(_windows(entries, kind, layers))
    facts |= rotary_facts(join_parameters(entries, kind.base))
    facts |= _feed_forward(entries, kind, layers)
    for name, value in _FIXED.items():
        if (found := entries.get(name, value)) != value:
            raise UnfitWeights(
                f"config.json has {name} {found}, but pseudoreal computes only models with {name} {value}; start from"
                f" weights with {name} {value}"
            )
    if unknown := [name for name in entries.unread() if name not in _SAYS_NOTHING]:
        raise UnfitWeights(
            f"config.json has the entries {', '.join(unknown)}, which a {model_type} is not known to have; they may"
            " change what it computes; remove those that do not"
        )
    return facts


def _shape(entries: ConfigEntries, kind: _Kind, layers: int) -> Facts:
    hidden, heads = entries.integer("hidden_size"), entries.integer("num_attention_heads")
    return {
        "layers": layers,
        "hiddenSize": hidden,
        "vocabularySize": entries.integer("vocab_size"),
        "embeddings": "Tied" if entries.get("tie_word_embeddings", False) else "Separate",
        "logitSoftCap": None,
        "attention.heads": heads,
        "attention.keyValueHeads": _key_value_heads(entries, kind) or heads,
        "attention.headSize": entries.integer("head_dim", kind.head_size or hidden // heads),
        "attention.bias": _bias(entries, kind),
        "attention.queryKeyNorm": kind.query_key_norm,
        "norm.placement": kind.placement,
        "norm.epsilon": entries.number("rms_norm_eps", kind.epsilon),
        "feedForward.activation": "SwiGLU",
    }


def _key_value_heads(entries: ConfigEntries, kind: _Kind) -> int | None:
    """Return the number of key-value heads; None (null) means as many as heads. A missing entry means the default of
    the class."""
    found: int | None = entries.get("num_key_value_heads", kind.key_value_heads)
    return found


def _bias(entries: ConfigEntries, kind: _Kind) -> str:
    has_bias = bool(entries.get("attention_bias", False))
    if kind.bias == "Entry":
        return "All" if has_bias else "None"
    if has_bias:
        raise UnfitWeights("config.json has attention_bias true, and transformers computes none in this model_type")
    return kind.bias


def _windows(entries: ConfigEntries, kind: _Kind, layers: int) -> list[int | None]:
    """Return the window of each layer."""
    if kind.window == "None":
        return [None] * layers
    size: int | None = entries.get("sliding_window", kind.window_size)
    if kind.window != "Always" and not entries.get("use_sliding_window", False):
        size = None
    if kind.window != "ByLayer":
        return [size] * layers
    first = entries.get("max_window_layers", 28)
    kinds = entries.get("layer_types", None)
    if kinds is None:
        return [size if layer >= first else None for layer in range(layers)]
    if len(kinds) != layers or not {*kinds} <= {"sliding_attention", "full_attention"}:
        raise UnfitWeights(
            f"config.json has the layer_types {kinds}; it must be full or sliding_attention for each layer"
        )
    return [size if each == "sliding_attention" else None for each in kinds]


def _feed_forward(entries: ConfigEntries, kind: _Kind, layers: int) -> Facts:
    size = entries.integer("intermediate_size")
    has_bias = kind.has_mlp_bias and entries.get("mlp_bias", False)
    facts: Facts = {"feedForward.bias": "All" if has_bias else "None"}
    if kind.experts == "Mixtral":
        count = _count(entries, 8)
        return facts | _top_k(count, entries.integer("num_experts_per_tok", 2), size, "Renormalised", [])
    if kind.experts == "None":
        return facts | {"feedForward.size": size}
    step, only = entries.integer("decoder_sparse_step", 1), entries.get("mlp_only_layers", None) or []
    dense = [layer for layer in range(layers) if layer in only or (layer + 1) % step]
    per_token, width = entries.integer("num_experts_per_tok", 8), entries.integer("moe_intermediate_size", 768)
    weights = "Renormalised" if entries.get("norm_topk_prob", False) else "Scores"
    facts |= {"feedForward.size": size} if dense else {}
    return facts | _top_k(_count(entries, 128), per_token, width, weights, dense)


def _count(entries: ConfigEntries, default: int) -> int:
    """Return the number of experts: in transformers 5, `num_local_experts` and `num_experts` mean the same."""
    names = ("num_experts", "num_local_experts")
    found = {value for name in names if (value := entries.get(name, None)) is not None} or {default}
    if len(found) > 1:
        raise UnfitWeights("config.json says num_experts and num_local_experts, and they differ; make them the same")
    return int(found.pop())


def _top_k(count: int, per_token: int, size: int, weights: str, dense: list[int]) -> Facts:
    return {
        "experts.type": "TopK",
        "experts.count": count,
        "experts.denseLayers": dense,
        "experts.topK.perToken": per_token,
        "experts.topK.size": size,
        "experts.topK.score": "Softmax",
        "experts.topK.weights": weights,
        "experts.topK.scale": 1.0,
        "experts.topK.sharedExperts": 0,
    }
