"""The job that the benchmark trains, and the samples that the job reads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.resolved.resolve import phase_config
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.network import Preflight
from pseudoreal_trainer.data.order import phase_samples
from pseudoreal_trainer.data.prepare.prepare import prepare
from pseudoreal_trainer.data.prepare.settings import Settings
from pseudoreal_trainer.data.sources import MixedStream
from pseudoreal_trainer.data.token_corpus import TokenCorpus, open_corpus
from pseudoreal_trainer.data.tokenizer.train import train_tokenizer, write_tokenizer

from benchmarks.data.text import python_sources, write_json_lines

PHASE = "real"
SOURCE = "train"
LEARNING_RATE = "1e-3"
AS_GOOD_AS_ZERO = "1e-30"
"""A learning rate so small that no float32 weight changes."""
_NEVER = 1_000_000_000


@dataclass(frozen=True)
class Size:
    text_bytes: int
    vocabulary: int
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    sequence_length: int
    sequences: int
    """Sequences per step."""
    rounds: int
    warm_up: int
    """Untimed steps of each turn."""
    timed: int

    @property
    def steps(self) -> int:
        return self.warm_up + self.timed


FULL = Size(4 << 20, 16_384, 6, 256, 704, 4, 256, 8, rounds=3, warm_up=4, timed=16)
TINY = Size(1 << 17, 400, 2, 16, 32, 2, 16, 4, rounds=2, warm_up=1, timed=2)


def write_tokens(folder: Path, size: Size) -> None:
    """Write text of this size, a tokenizer trained on the text, and the text's token files into `folder`."""
    folder.mkdir()
    texts, corpus = python_sources(size.text_bytes), folder / "corpus.jsonl"
    write_json_lines(corpus, texts)
    write_tokenizer(folder / "tokenizer", train_tokenizer(texts, size.vocabulary))
    prepare([corpus], folder / SOURCE, str(folder / "tokenizer"), None, Settings(), 1, lambda *_: None)


def config_of(size: Size, tokens: Path, work: Path, *, steps: int, learning_rate: str = LEARNING_RATE) -> PhaseConfig:
    """Return the configuration of the phase for a rank. The job names no tokenizer, because it would then write a
    sample at its end."""
    job = PseudoRealJob.from_object(
        {
            "apiVersion": "pseudoreal.dev/v1alpha1",
            "kind": "PseudoRealJob",
            "metadata": {"name": "llama", "uid": "llama"},
            "spec": _spec(size, tokens, steps, learning_rate),
        }
    )
    config = phase_config(
        job, 0, execution=1, work_directory=str(work.resolve()), offload_directory=str(work.resolve() / "offload")
    )
    return config.model_copy(update={"preflight": Preflight(), "gpus": 0})


def _spec(size: Size, tokens: Path, steps: int, learning_rate: str) -> dict[str, Any]:
    return {
        "model": {
            "family": "Llama3",
            "layers": size.layers,
            "hiddenSize": size.hidden,
            "attention": {"heads": size.heads, "keyValueHeads": size.heads // 2},
            "feedForward": {"size": size.feed_forward},
            "sequenceLength": size.sequence_length,
            "vocabularySize": size.vocabulary,
        },
        "data": {
            "path": str(tokens.resolve()),
            "sources": [{"name": SOURCE}],
            "validation": {
                "everySteps": _NEVER,
                "sequences": 1,
                "sets": [{"name": "validation", "path": SOURCE}],
            },
        },
        "optimizer": {"learningRate": learning_rate, "warmupSteps": 0, "schedule": "Constant"},
        "precision": {"compute": "float32"},
        "phases": [
            {
                "name": PHASE,
                "until": {"step": steps},
                "batch": {"sequences": size.sequences},
                "activations": {"keep": "All"},
            }
        ],
        "checkpoint": {"everySteps": _NEVER},
    }


def batches(config: PhaseConfig, steps: int) -> NDArray[np.int32]:
    """Return the samples of the first steps, [steps, sequences, T + 1]."""
    corpus = open_corpus(config)
    assert isinstance(corpus, TokenCorpus)
    stream = MixedStream(phase_samples(0, {SOURCE: 1}, {}), corpus.sources, config.model.sequence_length)
    sequences = config.batch.sequences
    return stream.windows(0, steps * sequences).reshape(steps, sequences, -1)


def in_words(model: Model) -> str:
    attention = model.attention
    return (
        f"{model.family}: {model.layers} layers, hidden size {model.hidden_size}, {attention.heads} heads,"
        f" {attention.key_value_heads} key-value heads, feed-forward size {model.feed_forward.size}, vocabulary"
        f" {model.vocabulary_size:,}"
    )
