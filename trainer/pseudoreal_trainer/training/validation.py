"""Validation loss and generated samples.

Windows are evaluated one by one, and their losses are summed in a fixed order. So the loss has the same bits with any
numbers of data ranks and pipeline ranks. Context ranks, expert ranks and chunks of a sequence may change the order of
sums within a window: the loss is then the same up to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from numpy.typing import NDArray
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.wire.messages import Sample

from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.data.baseline import order2_nats
from pseudoreal_trainer.data.corpus import Corpus
from pseudoreal_trainer.data.documents import has_target
from pseudoreal_trainer.data.stream import Indices, spread_starts, take_windows
from pseudoreal_trainer.data.token_corpus import TokenCorpus
from pseudoreal_trainer.data.tokenizer.token_bytes import bits_per_byte
from pseudoreal_trainer.data.tokenizer.tokenizer import ByteTokenizer, Tokenizer
from pseudoreal_trainer.engine import evaluation
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.evaluation import assign_sequences
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.model.reference import Transformer, generate
from pseudoreal_trainer.model.sampling import Sampling
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.memory.activations import sequences_at_once
from pseudoreal_trainer.plan.memory.from_config import phase_sizes
from pseudoreal_trainer.plan.sizes import Device
from pseudoreal_trainer.training.data_source import WindowBatch
from pseudoreal_trainer.training.start import load_weights

SAMPLE_TOKENS = 300
"""Number of tokens generated after a phase."""
_PROMPT_TOKENS = 64
_SAMPLED_BYTES = 256 << 20
"""Maximum size of a checkpoint for which `sample_after_phase` loads the model."""


@dataclass(frozen=True)
class Validation:
    """Windows of one validation set, and the measurement of their loss."""

    windows: NDArray[Any]
    """Validation windows, bytes or token ids, [W, T + 1]."""
    at_once: int
    """Number of windows per rank in one run of the engine.

    Each window has a separate forward pass. The order of sums depends on the shapes of the matrix products: with
    several windows in a pass, the bits of the loss would depend on the number of data ranks.
    """

    text_bytes: int | None = None
    """Number of bytes of text that the targets encode; None if the tokenizer is unknown, or the targets encode no
    text."""
    end_of_document: int | None = None
    """Token that ends a document; attention stays within documents. None: attention spans whole sequences."""

    def bits_per_byte(self, loss: float) -> float | None:
        """Return the bits per byte of text for a loss in nats per token; None if `text_bytes` is unknown.

        Document-end tokens add to the loss but encode no byte.
        """
        return None if self.text_bytes is None else bits_per_byte(loss * self.tokens, self.text_bytes)

    @cached_property
    def tokens(self) -> int:
        """Number of targets, the denominator of the mean loss; at least 1, because windows may consist of empty
        documents."""
        if self.end_of_document is None:
            return len(self.windows) * len(self.windows[0, 1:])
        return max(1, int(has_target(self.windows, self.end_of_document).sum()))

    def measure(self, engine: Engine) -> float:
        """Return the validation loss in nats per token, equal to the bit on all ranks. Collective: every rank calls
        this."""
        groups = engine.groups
        sums = torch.zeros(len(self.windows), dtype=torch.float64, device=groups.device)
        shared = groups.layout.mesh.sequence_groups
        for own in assign_sequences(len(self.windows), shared, groups.sequence_group, self.at_once):
            batch = WindowBatch([self.windows[sequence.index] for sequence in own])
            for m, loss in engine.evaluate(batch, len(own)).items():
                if own[m].counts:
                    sums[own[m].index] = loss
        # One rank contributes to each entry and the others add zero, so the order of this reduction cannot matter. With
        # context ranks, each contributes the loss of its part of the sequence.
        return float(sum(groups.ranks.sum_(sums).tolist())) / self.tokens


@dataclass(frozen=True)
class Prompts:
    """Prompts for generated samples at each validation."""

    texts: Sequence[str]
    tokens: Sequence[Sequence[int]]
    """`texts` as token ids, at least one token each."""
    count: int
    """Number of tokens generated after each prompt."""
    seed: int
    tokenizer: Tokenizer
    sequence: int
    """Sequence length of the model, in tokens."""
    at_once: int
    """Number of prompts per rank in one run of the engine."""

    def samples(self, engine: Engine) -> list[Sample]:
        """Return the prompts with the continuations generated by the current weights, equal on all ranks. Collective:
        every rank calls this."""
        sampling = Sampling(self.tokenizer.vocabulary, seed=self.seed)
        written = evaluation.generate(engine, self.tokens, self.count, self.sequence, sampling, self.at_once)
        texts = map(self.tokenizer.decode, written)
        return [Sample(prompt=prompt, text=text) for prompt, text in zip(self.texts, texts, strict=True)]


def window_starts(corpus: Corpus, sequence: int, most: int) -> Indices:
    """Return the starts of at most `most` windows, spread evenly over the validation part without overlap."""
    return spread_starts(len(corpus.validation), sequence, most)


def phase_validations(
    config: PhaseConfig, corpus: Corpus | TokenCorpus, layout: Layout, device: Device
) -> dict[str, Validation]:
    """Return name of the validation set -> validation. A text is one set with an empty name."""
    at_once = sequences_at_once(layout, phase_sizes(config, device))
    if isinstance(corpus, TokenCorpus):
        end = corpus.end_of_document
        return {name: Validation(each, at_once, _text_bytes(corpus, each), end) for name, each in corpus.sets.items()}
    starts = window_starts(corpus, config.model.sequence_length, config.data.validation.sequences)
    windows = take_windows(corpus.validation, starts, config.model.sequence_length)
    return {"": Validation(windows, at_once, text_bytes=windows[:, 1:].size)}


def phase_prompts(config: PhaseConfig, corpus: Corpus | TokenCorpus, at_once: int) -> Prompts | None:
    """Return the job's prompts; None if the job has none. Raises InvalidJobError if a prompt cannot be tokenized."""
    spec = config.data.validation.samples
    if spec is None:
        return None
    tokenizer = corpus.tokenizer if isinstance(corpus, TokenCorpus) else ByteTokenizer()
    if tokenizer is None:
        raise InvalidJobError(
            "spec.data.validation.samples has prompts, and the tokenizer of the token files is not known; name it in"
            " spec.data.tokenizer, or remove samples"
        )
    tokens = [tokenizer.encode(text).tolist() for text in spec.prompts]
    if not all(tokens):
        raise InvalidJobError(
            f"spec.data.validation.samples: the tokenizer makes no token of the prompt"
            f" {spec.prompts[tokens.index([])]!r}; change it"
        )
    return Prompts(spec.prompts, tokens, spec.tokens, spec.seed, tokenizer, config.model.sequence_length, at_once)


def _text_bytes(corpus: TokenCorpus, windows: NDArray[Any]) -> int | None:
    if corpus.tokenizer is None:
        return None
    if windows.max() >= corpus.tokenizer.vocabulary:
        raise InvalidJobError(
            f"a validation set has the token {windows.max()}, and spec.data.tokenizer has only"
            f" {corpus.tokenizer.vocabulary:,}: name the tokenizer that made the files"
        )
    targets = windows[:, 1:]
    if corpus.end_of_document is not None:
        targets = targets[has_target(windows, corpus.end_of_document)]
    return int(corpus.tokenizer.token_bytes[targets].sum()) or None


def order2_baseline(config: PhaseConfig, corpus: Corpus) -> float:
    """Return the loss of an order-2 model of the bytes on the validation windows, in nats per token."""
    sequence = config.model.sequence_length
    starts = window_starts(corpus, sequence, config.data.validation.sequences)
    # Each window together with the byte before the window, [W, T + 2]. That byte may lie in the training part.
    return order2_nats(corpus.train, take_windows(corpus.text, corpus.boundary + starts - 1, sequence + 1))


def sample_after_phase(config: PhaseConfig, corpus: Corpus | TokenCorpus, store: CheckpointStore) -> Sample | None:
    """Return a text generated by the phase's newest checkpoint, from the first tokens of the validation text.

    Loads the whole model on this rank. None for a large model, because this rank may lack the memory for all weights.
    None also for token files without a known tokenizer. Only one rank calls this, after the commit of the checkpoint.
    """
    manifest = store.whole(store.committed(config.phase)[-1])
    tokenizer = corpus.tokenizer if isinstance(corpus, TokenCorpus) else ByteTokenizer()
    if tokenizer is None or manifest.bytes > _SAMPLED_BYTES:
        return None
    model = Transformer(config.model, config.sharing)
    load_weights(model, store.reader(manifest))
    text = next(iter(corpus.sets.values()))[0] if isinstance(corpus, TokenCorpus) else corpus.validation
    prompt: list[int] = text[:_PROMPT_TOKENS].tolist()
    sampling = Sampling(tokenizer.vocabulary, seed=config.data.seed)
    written = generate(model, prompt, SAMPLE_TOKENS, config.model.sequence_length, sampling)
    return Sample(prompt=tokenizer.decode(prompt), text=tokenizer.decode(written))
