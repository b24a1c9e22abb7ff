"""Model families against transformers' implementations in float64: logits, gradients and one AdamW step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from pseudoreal_api.resolved.layers import experts_of_layers
from pseudoreal_api.spec.model import Model, Rotary
from pseudoreal_api.spec.optimizer import Optimizer
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.convert.architectures import Ours, Places, architecture_of
from pseudoreal_trainer.model.attention import documents_of
from pseudoreal_trainer.model.rotary import frequencies, rotary
from pseudoreal_trainer.model.transformer import Transformer, build_model
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.adamw import adamw
from tests.unit.trainer.model.support.widened import causal_model, widened

LAYERS, HIDDEN, INNER, LENGTH = 3, 32, 48, 24
TOKENS = torch.randint(256, (3, LENGTH + 1), generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Family:
    module: str
    stem: str
    """Prefix of the class names in transformers."""
    ours: dict[str, Any]
    """Fields of our model, without sizes."""
    theirs: dict[str, Any] = field(default_factory=dict)
    """Fields of the transformers configuration, without sizes. Values common to both sides are written twice, so that a
    wrong translation cannot hide."""
    attention: dict[str, Any] = field(default_factory=dict)
    """Fields of our attention, without sizes."""
    head_size: int | None = 16

    @property
    def model(self) -> Model:
        sizes = {"heads": 4, "keyValueHeads": 2} | ({"headSize": self.head_size} if self.head_size else {})
        fields: dict[str, Any] = {"layers": LAYERS, "hiddenSize": HIDDEN, "sequenceLength": LENGTH}
        fields |= {"feedForward": {"size": INNER}, "attention": sizes | self.attention}
        return Model.model_validate(fields | self.ours)

    def of_transformers(self) -> nn.Module:
        config: dict[str, Any] = {
            "num_hidden_layers": LAYERS,
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "max_position_embeddings": LENGTH,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 256,
            "tie_word_embeddings": False,
            "attn_implementation": "sdpa",
            "pad_token_id": None,
        }
        if self.head_size:
            config["head_dim"] = self.head_size
        return causal_model(self.module, self.stem, config | self.theirs)


def _rope(base: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base} | scaling}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES = {
    "Llama3": Family("llama", "Llama", {"family": "Llama3"}, {"rms_norm_eps": 1e-5, **_rope(5e5)}),
    "Llama3, for longer sequences": Family(
        "llama",
        "Llama",
        {"family": "Llama3"},
        {"rms_norm_eps": 1e-5, **_rope(5e5, **LLAMA3, original_max_position_embeddings=64)},
        {"rotary": {"scaling": {"type": "Llama3", "llama3": {"factor": "8", "originalSequenceLength": 64}}}},
    ),
    "Llama, with biases": Family(
        "llama",
        "Llama",
        {"feedForward": {"size": INNER, "activation": "SwiGLU", "bias": "All"}},
        {"rms_norm_eps": 1e-6, "attention_bias": True, "mlp_bias": True, **_rope(1e4)},
        {"bias": "All"},
    ),
    "Qwen2": Family("qwen2", "Qwen2", {"family": "Qwen2"}, {"rms_norm_eps": 1e-6, **_rope(1e6)}),
    "Qwen2, with windows": Family(
        "qwen2",
        "Qwen2",
        {"family": "Qwen2"},
        {
            "rms_norm_eps": 1e-6,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
            **_rope(1e6),
        },
        {"window": {"size": 7, "layers": [1, 2]}},
    ),
    "Qwen3": Family("qwen3", "Qwen3", {"family": "Qwen3"}, {"rms_norm_eps": 1e-6, **_rope(1e6)}),
    "Qwen3, for longer sequences": Family(
        "qwen3",
        "Qwen3",
        {"family": "Qwen3"},
        {
            "rms_norm_eps": 1e-6,
            **_rope(1e6, rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
        },
        {"rotary": {"scaling": {"type": "Yarn", "yarn": {"factor": "4", "originalSequenceLength": 64}}}},
    ),
    "Mistral": Family(
        "mistral",
        "Mistral",
        {"family": "Mistral"},
        {"rms_norm_eps": 1e-5, "sliding_window": 7, **_rope(1e6)},
        {"window": {"size": 7}},
    ),
    "OLMo2": Family("olmo2", "Olmo2", {"family": "OLMo2"}, {"rms_norm_eps": 1e-6, **_rope(5e5)}, head_size=None),
    "Mixtral": Family(
        "mixtral",
        "Mixtral",
        {"family": "Mixtral", "experts": {"type": "TopK", "count": 4, "topK": {"perToken": 2}}},
        {
            "rms_norm_eps": 1e-5,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "experts_implementation": "eager",
            **_rope(1e6),
        },
    ),
    "Qwen3MoE, with a dense layer": Family(
        "qwen3_moe",
        "Qwen3Moe",
        {
            "family": "Qwen3MoE",
            "experts": {
                "type": "TopK",
                "count": 6,
                "topK": {"perToken": 3, "size": 20, "weights": "Scores"},
                "denseLayers": [1],
            },
        },
        {
            "rms_norm_eps": 1e-6,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "experts_implementation": "eager",
            **_rope(1e6),
        },
    ),
}

EXPERTS = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"), "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj")}
"""Module -> names of an expert's matrices in published files: parent module, gate, up, down."""


def _published(family: Family, theirs: nn.Module, take: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
    """Return name in a published file -> value taken from its parameter. In memory, all experts of a layer are one
    tensor."""
    found: dict[str, Tensor] = {}
    for name, parameter in theirs.named_parameters():
        value = take(parameter)
        assert value is not None, name
        layer, is_expert, matrix = name.partition("mlp.experts.")
        if is_expert:
            part, gate, up, down = EXPERTS[family.module]
            names = (gate, up) if matrix == "gate_up_proj" else (down,)
            for expert, both in enumerate(value):
                pieces = zip(names, both.chunk(len(names)), strict=True)
                found |= {f"{layer}{part}.experts.{expert}.{n}.weight": piece for n, piece in pieces}
        elif family.module in EXPERTS:
            found[name.replace("mlp.gate.weight", f"{EXPERTS[family.module][0]}.gate.weight")] = value
        else:
            found[name] = value
    return found


def _pair(family: Family) -> tuple[Transformer, nn.Module, Places]:
    """Return our model, the transformers model with the same weights, and published name -> our tensor. Norms and
    biases are moved away from ones and zeros, which would hide their effect."""
    ours = build_model(family.model, Sharing(blocks=LAYERS), 5, torch.float64)
    generator = torch.Generator().manual_seed(2)
    for parameter in ours.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    experts = experts_of_layers(Sharing(blocks=LAYERS), family.model)
    names = architecture_of(family.model).names(family.model, range(LAYERS), experts)
    theirs = family.of_transformers()
    places = _published(family, theirs, lambda parameter: parameter.data)
    assert places.keys() == names.keys()
    assert {one.name for one in names.values()} == dict(ours.named_parameters()).keys()
    for name, place in places.items():
        place.copy_(_part(names[name], ours.get_parameter(names[name].name).data))
    return ours, theirs, names


def _part(one: Ours, tensor: Any) -> Tensor:
    """Return the part of our tensor that a published tensor corresponds to."""
    found: Tensor = tensor if one.expert is None else tensor[one.expert]
    return found


def _loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())


def _logits(model: nn.Module) -> Tensor:
    found = model(TOKENS[:, :-1])
    logits: Tensor = found if isinstance(found, Tensor) else found.logits
    return logits


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_that_of_transformers(name: str) -> None:
    family = FAMILIES[name]
    ours, theirs, names = _pair(family)
    expected, found = _logits(theirs), _logits(ours)
    assert expected.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for logits in (expected, found):
        torch.autograd.backward(_loss(logits))
    _compare_gradients(family, ours, theirs, names)
    for model in (ours, theirs):
        adamw(model.parameters(), Optimizer(), 1e-3, fused=False).step()
    for published, weight in _published(family, theirs, lambda parameter: parameter.data).items():
        found = _part(names[published], ours.get_parameter(names[published].name).data)
        torch.testing.assert_close(found, weight, rtol=0, atol=1e-12, msg=published)


def _compare_gradients(family: Family, ours: Transformer, theirs: nn.Module, names: Places) -> None:
    for published, gradient in _published(family, theirs, lambda parameter: parameter.grad).items():
        assert gradient.abs().max() > 1e-7, "the gradient is not zero, so the comparison means something"
        found = _part(names[published], ours.get_parameter(names[published].name).grad)
        torch.testing.assert_close(found, gradient, rtol=0, atol=1e-12, msg=published)


END = 0
PACKED = TOKENS.clone().clamp(min=1)
for _row, _ends in enumerate(([5], [0, 9, 10], [23])):
    PACKED[_row, _ends] = END


@pytest.mark.parametrize("name", FAMILIES)
def test_documents_of_a_packed_row_are_those_of_transformers(name: str) -> None:
    """transformers separates documents by positions that restart at 0."""
    family = FAMILIES[name]
    ours, theirs, names = _pair(family)
    inputs, documents = PACKED[:, :-1], documents_of(PACKED, END, PACKED)
    expected = theirs(inputs, position_ids=documents.positions, use_cache=False).logits
    found = ours(inputs, documents)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert (found - ours(inputs)).abs().max() > 1e-3, "masks change the logits"
    targets = PACKED[:, 1:].masked_fill(inputs == END, -100)
    for logits in (expected, found):
        torch.autograd.backward(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    _compare_gradients(family, ours, theirs, names)


def test_a_window_changes_what_is_computed() -> None:
    """Otherwise comparing windowed models would prove nothing."""
    windowed, whole = (build_model(FAMILIES[n].model, Sharing(blocks=LAYERS), 5, torch.float64) for n in _QWEN2)
    difference = (_logits(windowed) - _logits(whole)).abs().amax(dim=(0, 2))
    assert difference[:7].max() == 0
    assert difference[7:].min() > 0


_QWEN2 = ("Qwen2, with windows", "Qwen2")

PUBLISHED = {
    "Llama 3.1": (
        {"base": "500000", "scaling": {"type": "Llama3", "llama3": {"factor": "8", "originalSequenceLength": 8192}}},
        {"rope_theta": 5e5, **LLAMA3, "original_max_position_embeddings": 8192},
        128,
    ),
    "Qwen 3": (
        {"base": "1000000", "scaling": {"type": "Yarn", "yarn": {"factor": "4", "originalSequenceLength": 32768}}},
        {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        128,
    ),
    "DeepSeek V3": (
        {
            "base": "10000",
            "scaling": {
                "type": "Yarn",
                "yarn": {"factor": "40", "originalSequenceLength": 4096, "attentionFactor": "1"},
            },
        },
        {
            "rope_theta": 1e4,
            "rope_type": "yarn",
            "factor": 40.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        64,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_frequencies_are_those_of_published_models(name: str) -> None:
    from transformers import LlamaConfig

    ours, theirs, width = PUBLISHED[name]
    functions = widened("modeling_rope_utils").ROPE_INIT_FUNCTIONS
    config = LlamaConfig(head_dim=width, max_position_embeddings=131072, rope_parameters=theirs)
    expected, factor = functions[theirs["rope_type"]](config, torch.device("cpu"))
    found = frequencies(Rotary.model_validate(ours), width, torch.device("cpu"))
    torch.testing.assert_close(found, expected, rtol=2e-15, atol=0)
    fields = {"layers": 1, "hiddenSize": width, "sequenceLength": 4, "feedForward": {"size": 4}}
    model = Model.model_validate(fields | {"attention": {"heads": 1, "rotary": ours}})
    cosine, sine = rotary(model, 4, expected)
    torch.testing.assert_close(cosine.square() + sine.square(), torch.full_like(cosine, factor**2), rtol=1e-14, atol=0)
