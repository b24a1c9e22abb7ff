"""Validation: losses of the same windows, one by one, summed in the same order, on any number of ranks; and samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from numpy.typing import NDArray
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.wire.messages import Sample

from pseudoreal_trainer.data.corpus import Bytes, Corpus
from pseudoreal_trainer.data.documents import has_target
from pseudoreal_trainer.data.stream import Indices, spread_starts, take_windows
from pseudoreal_trainer.data.token_corpus import TokenCorpus
from pseudoreal_trainer.data.tokenizer.token_bytes import bits_per_byte
from pseudoreal_trainer.data.tokenizer.tokenizer import ByteTokenizer, Tokenizer
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.turns import turns
from pseudoreal_trainer.engine.writing import write
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.forecast.memory.evaluation import sequences_at_once
from pseudoreal_trainer.forecast.memory.from_config import phase_sizes
from pseudoreal_trainer.forecast.memory.sizes import Device
from pseudoreal_trainer.model.sampling import Sampling
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.training.batches import WindowBatch


@dataclass(frozen=True)
class Validation:
    windows: NDArray[Any]
    """The windows, bytes or tokens, [W, T + 1]."""
    at_once: int
    """Windows that a rank evaluates in one run of the engine. Each is a pass of its own: sums depend on the shapes of
    the products, so windows that share a pass would give other bits with other numbers of ranks or micro-batches."""

    text_bytes: int | None = None
    """Bytes of text that the targets stand for; None where the tokenizer is not known, and where they are no text."""
    end_of_document: int | None = None
    """The token that ends documents, within which tokens attend; None: they attend in whole sequences."""

    def bits_per_byte(self, loss: float) -> float | None:
        """Bits that a byte of the text costs at this loss, in nats per token. The ends of documents cost, too, and
        stand for no byte."""
        return None if self.text_bytes is None else bits_per_byte(loss * self.tokens, self.text_bytes)

    @cached_property
    def tokens(self) -> int:
        """Targets that the loss is the mean of; at least 1, as windows may consist of empty documents."""
        if self.end_of_document is None:
            return len(self.windows) * len(self.windows[0, 1:])
        return max(1, int(has_target(self.windows, self.end_of_document).sum()))

    def measure(self, engine: Engine) -> float:
        """The validation loss, nats per token; the same bits on every rank. Every rank calls this."""
        mesh = engine.mesh
        sums = torch.zeros(len(self.windows), dtype=torch.float64, device=mesh.device)
        for own in turns(len(self.windows), mesh.layout.data, mesh.data_rank, self.at_once):
            batch = WindowBatch([self.windows[turn.index] for turn in own])
            for m, loss in engine.evaluate(batch, len(own)).items():
                if own[m].counts:
                    sums[own[m].index] = loss
        # Every entry is zero on all ranks but one, so the order of this reduction cannot matter.
        return float(sum(mesh.ranks.sum_(sums).tolist())) / self.tokens


@dataclass(frozen=True)
class Prompts:
    """Texts that the model goes on from at each validation."""

    texts: Sequence[str]
    tokens: Sequence[Sequence[int]]
    """The same as tokens, at least one each."""
    count: int
    """Tokens that are written behind each."""
    seed: int
    tokenizer: Tokenizer
    sequence: int
    at_once: int
    """Prompts that a rank evaluates in one run of the engine."""

    def samples(self, engine: Engine) -> list[Sample]:
        """What the present weights write; the same on every rank. Every rank calls this."""
        sampling = Sampling(self.tokenizer.vocabulary, seed=self.seed)
        written = write(engine, self.tokens, self.count, self.sequence, sampling, self.at_once)
        texts = map(self.tokenizer.decode, written)
        return [Sample(prompt=prompt, text=text) for prompt, text in zip(self.texts, texts, strict=True)]


def window_starts(corpus: Corpus, sequence: int, most: int) -> Indices:
    """At most `most` windows, spread evenly over the validation part, without overlap."""
    return spread_starts(len(corpus.validation), sequence, most)


def phase_validations(
    config: PhaseConfig, corpus: Corpus | TokenCorpus, layout: Layout, device: Device
) -> dict[str, Validation]:
    """Validations by the names of their sets; a text is one set without a name."""
    at_once = sequences_at_once(layout, phase_sizes(config, device))
    if isinstance(corpus, TokenCorpus):
        end = corpus.end_of_document
        return {name: Validation(each, at_once, _text_bytes(corpus, each), end) for name, each in corpus.sets.items()}
    starts = window_starts(corpus, config.model.sequence_length, config.data.validation.sequences)
    windows = take_windows(corpus.validation, starts, config.model.sequence_length)
    return {"": Validation(windows, at_once, text_bytes=windows[:, 1:].size)}


def phase_prompts(config: PhaseConfig, corpus: Corpus | TokenCorpus, at_once: int) -> Prompts | None:
    """The prompts that the job has; None: it has none. Raises InvalidJobError where they cannot become tokens."""
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


def with_context(corpus: Corpus, sequence: int, most: int) -> Bytes:
    """[W, T + 2]: the validation windows with the byte before each, which may lie in the training part."""
    return take_windows(corpus.text, corpus.boundary + window_starts(corpus, sequence, most) - 1, sequence + 1)
