"""A folder that `transformers` loads: the model as a Llama or a Mixtral, and a tokenizer whose tokens are bytes.

https://huggingface.co/docs/transformers/model_doc/llama
https://huggingface.co/docs/transformers/model_doc/mixtral
"""

import json
from pathlib import Path
from typing import Any

from pseudoreal_api.spec.model import Model

from pseudoreal_trainer.checkpoint.materialize import Tracked
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.tensor_file import Form, TensorWriter
from pseudoreal_trainer.convert.architectures import Architecture, architecture_of
from pseudoreal_trainer.data.tokenizer.byte_characters import BYTE_CHARACTERS
from pseudoreal_trainer.model.constants import EPSILON, ROTARY_BASE
from pseudoreal_trainer.plan.sharing import blocks_of_layers
from pseudoreal_trainer.plan.units import VOCABULARY

_OUTSIDE = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}


def write_huggingface(source: Reader, folder: Path, tracked: Tracked[str]) -> None:
    """Writes the folder. Raises NotExportable when the model is neither a Llama nor a Mixtral."""
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
        for theirs, ours in architecture.in_layer.items()
    }
    return _OUTSIDE | inside


def _config(model: Model, architecture: Architecture, dtype: str) -> dict[str, Any]:
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": VOCABULARY,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.feed_forward.size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.attention.heads,
        "num_key_value_heads": model.attention.heads,
        "head_dim": model.hidden_size // model.attention.heads,
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "rope_theta": ROTARY_BASE,
        "max_position_embeddings": model.sequence_length,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": dtype,
        **architecture.config,
    }


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
