"""A folder that `transformers` loads: the model as one of its own, and a tokenizer whose tokens are bytes.

https://huggingface.co/docs/transformers/model_doc/llama
https://huggingface.co/docs/transformers/model_doc/mixtral
"""

import json
from pathlib import Path
from typing import Any

from pseudoreal_api.spec.model import Model, Rotary

from pseudoreal_trainer.checkpoint.materialize import Tracked
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.tensor_file import Form, TensorWriter
from pseudoreal_trainer.convert.architectures import Architecture, architecture_of
from pseudoreal_trainer.data.tokenizer.byte_characters import BYTE_CHARACTERS
from pseudoreal_trainer.plan.sharing import blocks_of_layers

_OUTSIDE = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}


def write_huggingface(source: Reader, folder: Path, tracked: Tracked[str]) -> None:
    """Writes the folder. Raises NotExportable when `transformers` has no such model."""
    model = source.manifest.model
    architecture = architecture_of(model)
    names = _names(source, architecture)
    forms = {theirs: Form(source.shape(ours), source.dtype) for theirs, ours in names.items()}
    writer = TensorWriter(folder / "model.safetensors", forms, {"format": "pt"})
    for theirs in tracked(list(names), "writing"):
        writer.append(source.tensor(names[theirs]))
    writer.finish()
    _write_json(folder / "config.json", _config(model, architecture, source.dtype))
    _write_json(folder / "tokenizer.json", _tokenizer())
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def _names(source: Reader, architecture: Architecture) -> dict[str, str]:
    """Their names -> ours. Layers that share a block get a copy each."""
    blocks = blocks_of_layers(source.manifest.sharing, source.manifest.model.layers)
    inside = {
        f"model.layers.{layer}.{theirs}": f"blocks.{block}.{ours}"
        for layer, block in enumerate(blocks)
        for theirs, ours in architecture.names(source.manifest.model, layer).items()
    }
    outside = {theirs: ours for theirs, ours in _OUTSIDE.items() if ours in source.names}
    return outside | inside


def _config(model: Model, architecture: Architecture, dtype: str) -> dict[str, Any]:
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": model.vocabulary_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.feed_forward.size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.attention.heads,
        "num_key_value_heads": model.attention.key_value_heads or model.attention.heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": float(model.norm.epsilon),
        "rope_theta": float(model.attention.rotary.base),
        "rope_parameters": _rotary(model.attention.rotary),
        "max_position_embeddings": model.sequence_length,
        "attention_bias": False,
        "tie_word_embeddings": model.embeddings == "Tied",
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": dtype,
        **architecture.config,
    }


def _rotary(spec: Rotary) -> dict[str, Any]:
    """The rotary positions as `transformers` 5 reads them; version 4 reads `rope_theta` alone."""
    base: dict[str, Any] = {"rope_theta": float(spec.base)}
    if spec.scaling is None:
        return {"rope_type": "default", **base}
    if (llama3 := spec.scaling.llama3) is not None:
        return base | {
            "rope_type": "llama3",
            "factor": float(llama3.factor),
            "low_freq_factor": float(llama3.low_frequency_factor),
            "high_freq_factor": float(llama3.high_frequency_factor),
            "original_max_position_embeddings": llama3.original_sequence_length,
        }
    yarn = spec.scaling.yarn
    assert yarn is not None, "a scaling has the numbers of its type"
    factor = {} if yarn.attention_factor is None else {"attention_factor": float(yarn.attention_factor)}
    return (
        base
        | factor
        | {
            "rope_type": "yarn",
            "factor": float(yarn.factor),
            "beta_fast": float(yarn.beta_fast),
            "beta_slow": float(yarn.beta_slow),
            "original_max_position_embeddings": yarn.original_sequence_length,
        }
    )


def _tokenizer() -> dict[str, Any]:
    """A tokenizer in the format of the `tokenizers` library: byte-level BPE without merges, where token b is byte b."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character: byte for byte, character in enumerate(BYTE_CHARACTERS)},
            "merges": [],
        },
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
