"""Evaluations during training: sequences for each data rank, and text that the model generates.

Text is generated in any layout and with any homes. Each token takes one evaluation of all prompts, each prompt in a
pass as long as a training sequence, like the windows of a validation. So generation needs no more memory than
validation and no kernels for another shape. The same weights generate the same tokens in every layout, unless a draw is
so close that rounding decides: context ranks, expert ranks and chunks of a sequence may change the order of sums.
Padding after a prompt's last token cannot affect that token: attention is causal, and a full expert has accepted
earlier tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.model.sampling import Sampling, draw, skip
from pseudoreal_trainer.plan.memory.pinned_arena import MicroBatchShape


@dataclass(frozen=True)
class AssignedSequence:
    """A sequence assigned to a data rank for one run of the engine."""

    index: int
    """Index among all sequences. A rank with fewer sequences than other ranks repeats the last sequence."""
    counts: bool
    """Whether the sequence counts on this rank. If not, it counts on another rank, and this rank only takes part in the
    collectives."""


def assign_sequences(count: int, parts: int, part: int, at_once: int) -> Iterator[list[AssignedSequence]]:
    """Yield the sequences of one of `parts` parts, at most `at_once` per run. All parts have the same number of runs
    and of sequences per run. Each of the `count` sequences counts in one part. A part belongs to a data rank, or to a
    group of context ranks."""
    own = [first + part for first in range(0, count, parts)]
    for begin in range(0, len(own), at_once):
        yield [AssignedSequence(min(index, count - 1), index < count) for index in own[begin : begin + at_once]]


@dataclass(frozen=True)
class _Contexts:
    """Micro-batches for computing the next token of each text. Each micro-batch holds the last tokens of one text."""

    texts: Sequence[Sequence[int]]
    sequence: int
    padding: int
    """Padding token after the text."""

    def shape(self, micro_batch: int) -> MicroBatchShape:  # noqa: ARG002
        return 1, self.sequence

    def tokens(self, micro_batch: int) -> Tensor:
        """Return the last tokens of a text, followed by padding: [1, T + 1]."""
        seen = torch.tensor(self.texts[micro_batch][-self.sequence :])
        return torch.nn.functional.pad(seen, (0, self.sequence + 1 - len(seen)), value=self.padding)[None]

    @property
    def lasts(self) -> list[int]:
        """Index of each text's last token in its micro-batch."""
        return [min(len(text), self.sequence) - 1 for text in self.texts]


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], count: int, sequence: int, sampling: Sampling, at_once: int
) -> list[list[int]]:
    """Continue each prompt by `count` tokens and return these tokens, the same on every rank. Collective over all
    ranks. Each prompt has at least one token.

    `sequence`: length of a training sequence, in tokens. `at_once`: prompts that a rank evaluates in one run of the
    engine.
    """
    texts = [[*prompt] for prompt in prompts]
    # One generator per prompt, so that its text depends neither on other prompts nor on the number of ranks.
    draws = [_Draws(torch.Generator().manual_seed(sampling.seed + number), sampling) for number in range(len(texts))]
    for number in range(count):
        for text, token in zip(texts, _next_tokens(engine, texts, sequence, draws, number, at_once), strict=True):
            text.append(token)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


@dataclass
class _Draws:
    """Draws of the tokens of one text on this rank. Ranks may take turns: with context ranks, the last token of a
    growing text moves from rank to rank."""

    generator: torch.Generator
    sampling: Sampling
    done: int = 0
    """Number of draws for which `generator` was advanced."""

    def draw(self, number: int, logits: Tensor) -> int:
        """Return token `number` of the text, from the logits [V], as if this rank had drawn all tokens before."""
        for _ in range(self.done, number):
            skip(logits, self.sampling, self.generator)
        self.done = number + 1
        return draw(logits, self.sampling, self.generator)


def _next_tokens(
    engine: Engine,
    texts: Sequence[Sequence[int]],
    sequence: int,
    draws: Sequence[_Draws],
    number: int,
    at_once: int,
) -> list[int]:
    """Return the next token of each text, token `number` after its prompt; the same on every rank. Raises
    FloatingPointError, on every rank, if logits are NaN."""
    groups, shared = engine.groups, engine.groups.layout.mesh.sequence_groups
    # Do not pad with the end-of-document token: each one would start a document, and attention is called once per
    # document.
    padding = 1 if engine.blueprint.end_of_document == 0 else 0
    # One rank has the logits of a text: the rank of the head that has the text's last token. It draws the next token,
    # or -1 if it cannot, so that no rank waits for it; all other ranks add 0 to the token's id.
    ids = [0] * len(texts)
    for own in assign_sequences(len(texts), shared, groups.sequence_group, at_once):
        contexts = _Contexts([texts[assigned.index] for assigned in own], sequence, padding)
        for m, logits in engine.logits(contexts, contexts.lasts).items():
            if own[m].counts:
                ids[own[m].index] = -1 if logits.isnan().any() else draws[own[m].index].draw(number, logits)
    found: list[int] = groups.ranks.sum_(torch.tensor(ids, device=groups.device)).tolist()
    if min(found, default=0) < 0:
        raise FloatingPointError("the model's logits are not numbers (NaN), so no token can be drawn")
    return found
