"""Small models of each family, created and saved by transformers, and the jobs that start from them.

Values common to both sides are written twice, so that a wrong translation cannot hide.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.checkpoint.fence import Fence
from pseudoreal_trainer.checkpoint.origin import Anew
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.store import store_of
from pseudoreal_trainer.data.corpus import load_corpus
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.plan.memory.from_config import phase_layout
from pseudoreal_trainer.training.saving import Saver
from pseudoreal_trainer.training.start import fill, first_progress, open_engine, open_imported

LAYERS, HIDDEN, INNER, ROWS, LENGTH = 4, 32, 48, 260, 16
SHARD = "40KB"
"""Size limit of a file; each model needs several files."""


@dataclass(frozen=True)
class Family:
    stem: str
    """Prefix of the class names in transformers."""
    ours: dict[str, Any]
    """Fields of spec.model, without sizes."""
    theirs: dict[str, Any] = field(default_factory=dict)
    """Entries of config.json, without sizes."""
    attention: dict[str, Any] = field(default_factory=dict)
    head_size: int | None = 16

    @property
    def model(self) -> dict[str, Any]:
        """The whole of spec.model."""
        sizes = {"heads": 4, "keyValueHeads": 2} | ({"headSize": self.head_size} if self.head_size else {})
        fields: dict[str, Any] = {"layers": LAYERS, "hiddenSize": HIDDEN, "sequenceLength": LENGTH}
        fields |= {"vocabularySize": ROWS, "feedForward": {"size": INNER}, "attention": sizes | self.attention}
        return fields | self.ours

    def saved(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
        """Return transformers' model with random weights, after saving it in `folder` as several files."""
        import transformers

        torch.manual_seed(3)
        config = {
            "num_hidden_layers": LAYERS,
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": ROWS,
            "max_position_embeddings": 64,
            "initializer_range": 0.2,
            "bos_token_id": 7,
            "eos_token_id": 8,
        }
        config |= {"head_dim": self.head_size} if self.head_size else {}
        made = getattr(transformers, f"{self.stem}Config")(**config | self.theirs)
        model = getattr(transformers, f"{self.stem}ForCausalLM")(made).to(dtype).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                # Norm weights of one and biases of zero would hide their effect.
                parameter.data += 0.3 * torch.randn(parameter.shape).to(dtype)
        model.save_pretrained(folder, max_shard_size=SHARD)
        assert len([*folder.glob("*.safetensors")]) > 1, "the checkpoint has several files"
        return model


def _rope(base: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base} | scaling}


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
FAMILIES = {
    "Llama": Family(
        "Llama",
        {"family": "Llama3"},
        {"rms_norm_eps": 1e-5, **_rope(5e5, **_LLAMA3, original_max_position_embeddings=16)},
        {"rotary": {"scaling": {"type": "Llama3", "llama3": {"factor": "8", "originalSequenceLength": 16}}}},
    ),
    "Llama, tied, with biases": Family(
        "Llama",
        {"embeddings": "Tied", "feedForward": {"size": INNER, "activation": "SwiGLU", "bias": "All"}},
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, **_rope(1e4)},
        {"bias": "All"},
        head_size=None,
    ),
    "Mistral": Family(
        "Mistral",
        {"family": "Mistral"},
        {"rms_norm_eps": 1e-5, "sliding_window": 5, **_rope(1e6)},
        {"window": {"size": 5}},
    ),
    "Mistral, without a window": Family(
        "Mistral", {"family": "Mistral"}, {"rms_norm_eps": 1e-5, "sliding_window": None, **_rope(1e6)}
    ),
    "Qwen2": Family(
        "Qwen2",
        {"family": "Qwen2", "embeddings": "Tied"},
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 2,
            **_rope(1e6),
        },
        {"window": {"size": 5, "layers": [2, 3]}},
        head_size=None,
    ),
    "Qwen3": Family(
        "Qwen3",
        {"family": "Qwen3"},
        _rope(1e6, **_YARN, original_max_position_embeddings=16),
        {"rotary": {"scaling": {"type": "Yarn", "yarn": {"factor": "4", "originalSequenceLength": 16}}}},
    ),
    "OLMo2": Family("Olmo2", {"family": "OLMo2"}, {"rms_norm_eps": 1e-6, **_rope(5e5)}, head_size=None),
    "Mixtral": Family(
        "Mixtral",
        {"family": "Mixtral", "experts": {"type": "TopK", "count": 3, "topK": {"perToken": 2}}},
        {"num_local_experts": 3, "num_experts_per_tok": 2, **_rope(1e6)},
        head_size=None,
    ),
    "Qwen3 MoE": Family(
        "Qwen3Moe",
        {
            "family": "Qwen3MoE",
            "experts": {
                "type": "TopK",
                "count": 3,
                "topK": {"perToken": 2, "size": 24, "weights": "Scores"},
                "denseLayers": [0, 2],
            },
        },
        {
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "use_sliding_window": True,
            "sliding_window": 5,
            **_rope(1e6),
        },
        {"window": {"size": 5}},
    ),
}


def begin_with(weights: Path | str, family: Family, job_body: dict[str, Any], **start: Any) -> None:
    """Let the job start from the weights."""
    spec = job_body["spec"]
    spec["model"] = family.model
    spec["precision"] = {"compute": "float32"}
    spec["phases"][0].pop("sharing", None)
    spec["checkpoint"]["startFrom"] = {"type": "HuggingFace", "huggingFace": {"path": str(weights)}, **start}


def begin(config: PhaseConfig, ranks: Ranks | None = None) -> Reader:
    """Start the phase and save its initial state. Collective: every rank of the phase must call it."""
    ranks = ranks or Ranks(0, 1, torch.device("cpu"))
    imported = open_imported(config, Anew(), checks=ranks.is_first)
    corpus = load_corpus(config.data, config.model.sequence_length)
    store = store_of(config)
    with open_engine(config, phase_layout(config, "cpu"), ranks) as engine:
        fill(engine, config, Anew(), imported)
        with Saver(engine, store, Fence(store.work_directory, 1), config.checkpoint, None) as saver:
            saver.start(first_progress(config, Anew(), imported).manifest(config, corpus.identity))
            saver.finish()
    found = store.newest(config.phase)
    assert found is not None
    return found


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder, read by the safetensors library."""
    from safetensors.torch import load_file

    files = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    found = {name: tensor for file in files for name, tensor in file.items()}
    assert len(found) == sum(map(len, files)), "no tensor is in two files"
    return found


def edit(file: Path, change: Any) -> None:
    """Apply `change` to the JSON object in the file."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def layer_tensor(found: dict[str, torch.Tensor], layer: int, name: str) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = found[f"model.layers.{layer}.{name}"].float().numpy()
    return array
