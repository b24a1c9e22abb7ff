"""Models of `transformers` that compute the same function as ours, and their tensor names. One table serves import and
export. Values are copied unchanged: the layout of rotary pairs is the same. Files of `transformers` store each expert
as a tensor; our files stack the experts of a layer in one tensor."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from pseudoreal_api.spec.model import MixtureOfExperts, Model, TopK

from pseudoreal_trainer.errors import NotExportable
from pseudoreal_trainer.plan.units import block_name, experts_name

HEAD = "lm_head.weight"
"""The `transformers` name of the head; absent in models with tied embeddings."""

Names = Mapping[str, str]
"""`transformers` names -> our names."""


@dataclass(frozen=True)
class Ours:
    """Our counterpart of a `transformers` tensor: a tensor, or one expert's part of a stacked tensor."""

    name: str
    """Our name of the tensor."""
    expert: int | None = None
    """Index of the expert in a stacked tensor; None: the whole tensor."""

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape. `whole`: shape of our tensor."""
        return whole if self.expert is None else whole[1:]

    def elements(self, whole: tuple[int, ...]) -> range:
        """Return the range of elements in our flattened tensor of shape `whole`."""
        count = prod(self.shape(whole))
        return range((self.expert or 0) * count, (self.expert or 0) * count + count)


Places = Mapping[str, Ours]
"""`transformers` names -> our counterparts."""

_OUTSIDE = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    HEAD: "head.weight",
}


@dataclass(frozen=True)
class Architecture:
    class_name: str
    model_type: str
    in_layer: Names
    """Names of a layer's tensors. In a mixture: of a layer with experts, except the experts' tensors."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Entries of config.json besides the entries common to all architectures."""
    in_dense_layer: Names = field(default_factory=dict)
    of_experts: Places = field(default_factory=dict)
    """Names of the tensors of a layer's experts."""

    def names(self, model: Model, blocks: Sequence[int], experts: Sequence[int | None]) -> Places:
        """Return the names of all tensors. `blocks`, `experts`: number of the block and of the expert set of each
        layer; layers that share a block or a set get a copy each."""
        found = {name: Ours(ours) for name, ours in _OUTSIDE.items() if name != HEAD or model.embeddings != "Tied"}
        for layer, block in enumerate(blocks):
            prefix = f"model.layers.{layer}."
            for theirs, ours in self._of_layer(model, layer).items():
                found[prefix + theirs] = Ours(f"{block_name(block)}.{ours}")
            if (number := experts[layer] if experts else None) is not None:
                for theirs, part in self.of_experts.items():
                    found[prefix + theirs] = replace(part, name=f"{experts_name(number)}.{part.name}")
        return found

    def _of_layer(self, model: Model, layer: int) -> Names:
        return self.in_layer if model.experts is None or model.has_experts(layer) else self.in_dense_layer


def architecture_of(model: Model, model_type: str | None = None) -> Architecture:
    """Return the architecture that computes the model's function; if `model_type` is given, the architecture of this
    type. Raises NotExportable, which names the field that no architecture supports."""
    _refuse(model.feed_forward.activation != "SwiGLU", "feedForward.activation", model.feed_forward.activation)
    _refuse(model.logit_soft_cap is not None, "logitSoftCap", model.logit_soft_cap)
    if model_type is not None:
        return _MODEL_TYPES[model_type](model)
    attention, placement = model.attention, model.norm.placement
    if placement == "Post" and attention.query_key_norm == "AllHeads":
        return _olmo2(model)
    _refuse(placement != "Pre", "norm.placement", placement)
    _refuse(attention.query_key_norm == "AllHeads", "attention.queryKeyNorm", attention.query_key_norm)
    if model.experts is not None:
        return _mixture(model)
    if attention.query_key_norm == "PerHead":
        return _qwen3(model)
    if attention.bias == "QueryKeyValue":
        return _qwen2(model)
    return _mistral(model) if attention.window else _llama(model)


def _llama(model: Model) -> Architecture:
    with_bias = {"attention_bias": model.attention.bias == "All", "mlp_bias": model.feed_forward.bias == "All"}
    return Architecture("LlamaForCausalLM", "llama", _attention(model) | _feed_forward(model), with_bias)


def _mistral(model: Model) -> Architecture:
    """Return a Mistral without bias. Its window, if any, applies to every layer."""
    window = _one_window(model)
    _refuse(model.attention.bias != "None", "attention.bias", model.attention.bias)
    _refuse_bias(model)
    names = _attention(model) | _feed_forward(model)
    return Architecture("MistralForCausalLM", "mistral", names, {"sliding_window": window})


def _qwen2(model: Model) -> Architecture:
    _refuse_bias(model)
    return Architecture("Qwen2ForCausalLM", "qwen2", _attention(model) | _feed_forward(model), _windows(model))


def _qwen3(model: Model) -> Architecture:
    _refuse(model.attention.bias == "QueryKeyValue", "attention.bias", model.attention.bias)
    _refuse_bias(model)
    config = {"attention_bias": model.attention.bias == "All", **_windows(model)}
    return Architecture("Qwen3ForCausalLM", "qwen3", _attention(model) | _feed_forward(model), config)


def _olmo2(model: Model) -> Architecture:
    """Return an OLMo 2. Its `post_attention_layernorm` is the post-norm of attention; a Llama's is the pre-norm of the
    MLP."""
    _refuse(model.experts is not None, "experts", "set")
    _refuse(model.attention.window is not None, "attention.window", "set")
    _refuse(model.attention.bias == "QueryKeyValue", "attention.bias", model.attention.bias)
    _refuse(model.query_size != model.hidden_size, "attention.headSize", model.attention.head_size)
    _refuse_bias(model)
    norms = {
        "post_attention_layernorm.weight": "attention_output_norm.weight",
        "post_feedforward_layernorm.weight": "ffn_output_norm.weight",
    }
    names = _projections(model) | norms | _feed_forward(model)
    return Architecture("Olmo2ForCausalLM", "olmo2", names, {"attention_bias": model.attention.bias == "All"})


def _mixture(model: Model) -> Architecture:
    """Return a Qwen 3 MoE if queries and keys have norms, else a Mixtral."""
    experts = model.experts
    assert experts is not None, "`architecture_of` calls this for mixtures only"
    _refuse_bias(model)
    if experts.top_k is None:
        return _one_prototype(model, experts)
    rate = experts.top_k.bias_update_rate
    _refuse(rate is not None, "experts.topK.biasUpdateRate", rate)
    _refuse(experts.top_k.score != "Softmax", "experts.topK.score", experts.top_k.score)
    _refuse(float(experts.top_k.scale) != 1, "experts.topK.scale", experts.top_k.scale)
    _refuse(experts.top_k.shared_experts > 0, "experts.topK.sharedExperts", experts.top_k.shared_experts)
    if model.attention.query_key_norm == "PerHead":
        return _qwen3_moe(model, experts, experts.top_k)
    _refuse(experts.top_k.weights != "Renormalised", "experts.topK.weights", experts.top_k.weights)
    return _mixtral(model, experts, experts.top_k.per_token)


def _one_prototype(model: Model, experts: MixtureOfExperts) -> Architecture:
    """Return a Mixtral with one expert per token; Mixtral's normalization gives this expert the weight 1. A Mixtral has
    no capacity limit: it also computes the tokens that our full experts refuse."""
    if experts.prototypes > 1:
        raise NotExportable(
            f"model.experts.prototypes is {experts.prototypes}, and a Mixtral has one router over all experts of a"
            " layer; export this one as safetensors"
        )
    _refuse(model.attention.query_key_norm != "None", "attention.queryKeyNorm", model.attention.query_key_norm)
    return _mixtral(model, experts, 1)


def _mixtral(model: Model, experts: MixtureOfExperts, per_token: int) -> Architecture:
    window = _one_window(model)
    _refuse(model.attention.bias != "None", "attention.bias", model.attention.bias)
    _refuse(bool(experts.dense_layers), "experts.denseLayers", experts.dense_layers)
    config = {
        "intermediate_size": model.expert.size,
        "num_local_experts": experts.count,
        "num_experts_per_tok": per_token,
        "sliding_window": window,
    }
    matrices = {"w1": "gate", "w2": "down", "w3": "up"}
    names = _attention(model) | {"block_sparse_moe.gate.weight": "router.weight"}
    of_experts = _experts("block_sparse_moe.experts", experts.count, matrices)
    return Architecture("MixtralForCausalLM", "mixtral", names, config, of_experts=of_experts)


def _qwen3_moe(model: Model, experts: MixtureOfExperts, top_k: TopK) -> Architecture:
    _refuse(model.attention.bias == "QueryKeyValue", "attention.bias", model.attention.bias)
    window = _one_window(model)
    config = {
        "attention_bias": model.attention.bias == "All",
        "num_experts": experts.count,
        "num_experts_per_tok": top_k.per_token,
        "moe_intermediate_size": model.expert.size,
        "norm_topk_prob": top_k.weights == "Renormalised",
        "decoder_sparse_step": 1,
        "mlp_only_layers": sorted(experts.dense_layers),
        "use_sliding_window": window is not None,
        "sliding_window": window,
    }
    matrices = {f"{name}_proj": name for name in ("gate", "up", "down")}
    names = _attention(model) | {"mlp.gate.weight": "router.weight"}
    dense, of_experts = _attention(model) | _feed_forward(model), _experts("mlp.experts", experts.count, matrices)
    return Architecture("Qwen3MoeForCausalLM", "qwen3_moe", names, config, dense, of_experts)


_MODEL_TYPES: Mapping[str, Callable[[Model], Architecture]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "olmo2": _olmo2,
    "mixtral": _mixture,
    "qwen3_moe": _mixture,
}


def _refuse(is_missing: bool, field: str, value: object) -> None:
    """Raise NotExportable if no architecture supports this value of the field."""
    if is_missing:
        raise NotExportable(
            f"model.{field} is {value}, and transformers has no model with that beside the rest of this one; export"
            " this one as safetensors"
        )


def _refuse_bias(model: Model) -> None:
    _refuse(model.feed_forward.bias != "None", "feedForward.bias", model.feed_forward.bias)


def _one_window(model: Model) -> int | None:
    """Return the window of every layer; None: no window. Raises NotExportable if only some layers have it."""
    window = model.attention.window
    sizes = {model.window_of(layer) for layer in range(model.layers)}
    _refuse(len(sizes) > 1, "attention.window.layers", window and window.layers)
    return sizes.pop()


def _windows(model: Model) -> dict[str, Any]:
    """Return the entries of a Qwen's config.json for the window of each layer."""
    window = model.attention.window
    if window is None:
        return {"use_sliding_window": False, "sliding_window": None}
    kinds = ["sliding_attention" if model.window_of(layer) else "full_attention" for layer in range(model.layers)]
    return {"use_sliding_window": True, "sliding_window": window.size, "layer_types": kinds, "max_window_layers": 0}


def _experts(prefix: str, count: int, matrices: Names) -> Places:
    """Return the names of a layer's experts as in published files; `transformers` 5 builds its stacked tensors from
    these. `matrices`: `transformers` name of an expert's matrix -> our name."""
    return {
        f"{prefix}.{expert}.{theirs}.weight": Ours(f"{ours}.weight", expert)
        for expert in range(count)
        for theirs, ours in matrices.items()
    }


_PROJECTIONS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
_WITH_BIAS = {"None": (), "QueryKeyValue": ("q_proj", "k_proj", "v_proj"), "All": tuple(_PROJECTIONS)}
_NORMS = {"q_norm": "query_norm", "k_norm": "key_norm"}


def _attention(model: Model) -> dict[str, str]:
    """Return the names of the tensors of attention, of its pre-norm, and of the MLP's pre-norm."""
    norms = {
        "input_layernorm.weight": "attention_norm.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
    }
    return norms | _projections(model)


def _projections(model: Model) -> dict[str, str]:
    parts = dict(_PROJECTIONS) if model.attention.query_key_norm == "None" else _PROJECTIONS | _NORMS
    names = {f"self_attn.{theirs}.weight": f"attention.{ours}.weight" for theirs, ours in parts.items()}
    biases = _WITH_BIAS[model.attention.bias]
    return names | {f"self_attn.{theirs}.bias": f"attention.{_PROJECTIONS[theirs]}.bias" for theirs in biases}


def _feed_forward(model: Model) -> dict[str, str]:
    kinds = ("weight", "bias") if model.feed_forward.bias == "All" else ("weight",)
    return {f"mlp.{name}_proj.{kind}": f"ffn.{name}.{kind}" for name in ("gate", "up", "down") for kind in kinds}
