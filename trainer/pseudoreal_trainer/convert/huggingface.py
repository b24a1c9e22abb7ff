"""Export to a folder that `transformers` loads: the model as one of its architectures, and the tokenizer.

- https://huggingface.co/docs/transformers/model_doc/llama
- https://huggingface.co/docs/transformers/model_doc/mixtral
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from pseudoreal_api.resolved.layers import blocks_of_layers, experts_of_layers
from pseudoreal_api.spec.model import Model, YarnScaling

from pseudoreal_trainer.checkpoint.manifest import Manifest
from pseudoreal_trainer.checkpoint.materialize import Tracked
from pseudoreal_trainer.checkpoint.precision import narrow
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.tensor_file import Form, TensorWriter
from pseudoreal_trainer.convert.architectures import Architecture, architecture_of
from pseudoreal_trainer.convert.facts import facts_of
from pseudoreal_trainer.convert.published_config import published_facts
from pseudoreal_trainer.convert.rotary import rotary_entries
from pseudoreal_trainer.convert.tokenizer_files import Source, special_tokens, write_tokenizer
from pseudoreal_trainer.convert.weights import CONFIG, INDEX, SINGLE

_SHARD = "model-{:05d}-of-{:05d}.safetensors"


@dataclass(frozen=True)
class Options:
    dtype: str | None = None
    """Type of the tensors; None: the checkpoint's type."""
    file_bytes: int = 5 * 10**9
    """Maximum number of bytes of tensors per file; a larger tensor has a file of its own."""
    tokenizer: Source | None = None
    """The tokenizer to write; None: the byte tokenizer if the model was trained on text, else no tokenizer."""


def write_huggingface(source: Reader, folder: Path, tracked: Tracked[str], options: Options) -> None:
    """Write the folder. Raises NotExportable if `transformers` has no such model."""
    manifest, dtype = source.manifest, options.dtype or source.dtype
    imported = manifest.imported or {}
    architecture = architecture_of(manifest.model, imported.get("model_type"))
    model, sharing = manifest.model, manifest.sharing
    names = architecture.names(model, blocks_of_layers(sharing, model.layers), experts_of_layers(sharing, model))
    forms = {theirs: Form(ours.shape(source.shape(ours.name)), dtype) for theirs, ours in names.items()}
    tokenizer = options.tokenizer or ("bytes" if manifest.consumed is None else None)
    # The config may raise: it is computed before anything is written.
    config = _config(manifest, architecture, dtype, tokenizer)
    files = _files(forms, options.file_bytes)
    places = {theirs: file for file, held in files.items() for theirs in held}
    for file, held in groupby(tracked(list(names), "writing"), places.__getitem__):
        writer = TensorWriter(folder / file, {theirs: forms[theirs] for theirs in files[file]}, {"format": "pt"})
        for theirs in held:
            ours = names[theirs]
            elements = ours.elements(source.shape(ours.name))
            for numbers in source.chunks(ours.name, "weights", elements.start, elements.stop):
                writer.append(narrow(numbers, dtype))
        writer.finish()
    if len(files) > 1:
        size = sum(form.size for form in forms.values())
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": places})
    _write_json(folder / CONFIG, config)
    write_tokenizer(folder, tokenizer)


def _files(forms: Mapping[str, Form], most: int) -> dict[str, list[str]]:
    """Return file -> its tensors, in order. A single file has the name that `transformers` looks for first."""
    shards = [*_shards(forms, most)]
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {_SHARD.format(number, len(shards)): held for number, held in enumerate(shards, 1)}


def _shards(forms: Mapping[str, Form], most: int) -> Iterator[list[str]]:
    held: list[str] = []
    size = 0
    for name, form in forms.items():
        if held and size + form.size > most:
            yield held
            held, size = [], 0
        held.append(name)
        size += form.size
    yield held


def _config(manifest: Manifest, architecture: Architecture, dtype: str, tokenizer: Source | None) -> dict[str, Any]:
    """Return the entries of config.json. Entries of imported weights are kept: they describe the model's function,
    which was checked at import, and facts unknown to us, such as the token that ends a text."""
    model, theirs = manifest.model, manifest.imported
    rotary = rotary_entries(model.attention.rotary)
    if theirs is None:
        return _described(model, architecture) | special_tokens(tokenizer) | rotary | {"dtype": dtype}
    lengths: dict[str, Any] = {}
    if _yarn(model) is None:
        # Under YaRN, transformers computes frequencies from max_position_embeddings: version 5 takes it as the original
        # length if none is named, version 4 divides it by the original length. So it stays as it is.
        lengths["max_position_embeddings"] = max(model.sequence_length, theirs.get("max_position_embeddings") or 0)
    types = dict.fromkeys({"dtype", "torch_dtype"} & theirs.keys() or {"dtype"}, dtype)
    if published_facts(theirs) != facts_of(model):
        # The model has grown since the import.
        kept = {name: value for name, value in theirs.items() if name not in _OF_LAYERS_AND_EXPERTS}
        theirs = {**kept, "num_hidden_layers": model.layers, **architecture.config}
    return {**rotary, **theirs, **lengths, **types}


_OF_LAYERS_AND_EXPERTS = {"layer_types", "max_window_layers", "mlp_only_layers", "num_experts", "num_local_experts"}
"""Entries of config.json that name single layers, or count experts."""


def _described(model: Model, architecture: Architecture) -> dict[str, Any]:
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
        "max_position_embeddings": _positions(model),
        "attention_bias": False,
        "tie_word_embeddings": model.embeddings == "Tied",
        **architecture.config,
    }


def _positions(model: Model) -> int:
    """Return max_position_embeddings. Under YaRN, `transformers` 4 divides it by the original length to get the
    factor."""
    yarn = _yarn(model)
    return model.sequence_length if yarn is None else round(float(yarn.factor) * yarn.original_sequence_length)


def _yarn(model: Model) -> YarnScaling | None:
    scaling = model.attention.rotary.scaling
    return None if scaling is None else scaling.yarn


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
