"""Which model of `transformers` computes what ours does, and its names for a layer's tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pseudoreal_api.spec.model import MixtureOfExperts, Model

from pseudoreal_trainer.convert.errors import NotExportable


@dataclass(frozen=True)
class Architecture:
    class_name: str
    model_type: str
    in_layer: Mapping[str, str]
    """Their names -> ours, for the tensors of a layer."""
    config: Mapping[str, Any]
    """Entries of its config.json beyond those of a Llama."""


def architecture_of(model: Model) -> Architecture:
    """The architecture that computes what the model does: a Llama, or with experts a Mixtral. Raises NotExportable."""
    name = "Llama" if model.experts is None else "Mixtral"
    if model.feed_forward.activation != "SwiGLU":
        raise NotExportable(
            f"model.feedForward.activation is {model.feed_forward.activation}, and a {name}'s is SwiGLU; export this"
            " one as safetensors"
        )
    if model.experts is None:
        return Architecture("LlamaForCausalLM", "llama", _ATTENTION | _LLAMA, {"mlp_bias": False})
    return _mixtral(model.experts)


def _mixtral(experts: MixtureOfExperts) -> Architecture:
    """A Mixtral with one expert for each token, whose weight Mixtral's normalization makes 1. It has no capacity: where
    ours are full, it computes what ours leave out."""
    if experts.prototypes > 1:
        raise NotExportable(
            f"model.experts.prototypes is {experts.prototypes}, and a Mixtral has one router over all experts of a"
            " layer; export this one as safetensors"
        )
    config = {"num_local_experts": experts.count, "num_experts_per_tok": 1, "sliding_window": None}
    return Architecture("MixtralForCausalLM", "mixtral", _ATTENTION | _experts(experts.count), config)


def _experts(count: int) -> dict[str, str]:
    """Their names -> ours for the experts of a layer, as Mixtral was published; `transformers` 5 makes its stacked
    tensors from these."""
    matrices = {"w1": "gate", "w2": "down", "w3": "up"}
    return {"block_sparse_moe.gate.weight": "router.weight"} | {
        f"block_sparse_moe.experts.{expert}.{theirs}.weight": f"experts.{expert}.{ours}.weight"
        for expert in range(count)
        for theirs, ours in matrices.items()
    }


_ATTENTION = {
    "input_layernorm.weight": "attention_norm.weight",
    "self_attn.q_proj.weight": "attention.query.weight",
    "self_attn.k_proj.weight": "attention.key.weight",
    "self_attn.v_proj.weight": "attention.value.weight",
    "self_attn.o_proj.weight": "attention.output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
_LLAMA = {
    "mlp.gate_proj.weight": "ffn.gate.weight",
    "mlp.up_proj.weight": "ffn.up.weight",
    "mlp.down_proj.weight": "ffn.down.weight",
}
