"""What a phase reads: the samples of a text, or those of a mixture of token files, which are read ahead of training."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from pseudoreal_api.resolved.config import PhaseConfig

from pseudoreal_trainer.data.corpus import Corpus
from pseudoreal_trainer.data.documents import Counts, count_documents
from pseudoreal_trainer.data.order import Stretch, check_epochs, continued, planned, stretch
from pseudoreal_trainer.data.prefetch import Prefetch
from pseudoreal_trainer.data.sources import MixedStream, Source
from pseudoreal_trainer.data.step_order import StepOrder
from pseudoreal_trainer.data.stream import Part, Stream, rank_parts
from pseudoreal_trainer.data.token_corpus import TokenCorpus
from pseudoreal_trainer.data.tokens.reader import Tokens
from pseudoreal_trainer.engine.ranks.mesh import Mesh
from pseudoreal_trainer.training.progress import Progress


class Samples(Protocol):
    @property
    def sequence(self) -> int: ...

    def windows(self, first: int, end: int) -> NDArray[Any]:
        """The samples at the cursors first..end-1, [end - first, sequence + 1]."""


class AheadOfTraining:
    """The samples of this rank, read by a thread two steps before they are asked for. A rank that asks for none reads
    none. The steps are asked for in their order, and the parts of a step in any order, as often as one likes."""

    def __init__(self, stream: MixedStream, parts: Callable[[int], list[Part]], first: int, stride: int) -> None:
        """`parts`: of the step that begins at a cursor. `first`: the cursor of the first step; `stride`: from one to
        the next."""
        self.sequence = stream.sequence
        self._stream, self._order = stream, StepOrder(stream, parts, stride)
        self._cursor, self._stride = first, stride
        self._prefetch: Prefetch[dict[Part, Tokens]] | None = None
        self._step: dict[Part, Tokens] = {}

    def windows(self, first: int, end: int) -> Tokens:
        if (first, end) not in self._step:
            self._step = self._begun().take(self._cursor)
            self._cursor += self._stride
        return self._step[first, end]

    @property
    def waited_seconds(self) -> float:
        """Seconds that training has waited for samples."""
        return 0.0 if self._prefetch is None else self._prefetch.waited_seconds

    def close(self, *, wait: bool = True) -> None:
        """End the thread. `wait`: whether to wait until the read that is under way has ended."""
        if self._prefetch is not None:
            self._prefetch.close(wait=wait)

    def _begun(self) -> Prefetch[dict[Part, Tokens]]:
        if self._prefetch is None:
            self._prefetch = Prefetch(self._read, self._cursor, self._stride)
        return self._prefetch

    def _read(self, cursor: int) -> dict[Part, Tokens]:
        return {part: self._stream.read(places) for part, places in self._order.step(cursor).items()}


Count = Callable[[int], Counts]
"""What the documents of the step that begins at a cursor count, over all ranks. Every rank calls it."""


class Reading:
    """The samples of a phase, what their documents count, and what is consumed of each source. To be closed."""

    def __init__(
        self, samples: Stream | AheadOfTraining, mixed: Stretch | None = None, count: Count | None = None
    ) -> None:
        """`count`: None where tokens attend in whole sequences."""
        self.samples: Samples = samples
        self._ahead = samples if isinstance(samples, AheadOfTraining) else None
        self._stretch, self._count = mixed, count

    def count(self, cursor: int) -> Counts | None:
        """What the documents of the step that begins at the cursor count, over all ranks; None where tokens attend in
        whole sequences. Every rank calls this, for one step after the other."""
        return None if self._count is None else self._count(cursor)

    def consumed(self, cursor: int) -> dict[str, int] | None:
        """Samples of each source before the cursor, from the job's start; None where the corpus is text."""
        return None if self._stretch is None else self._stretch.consumed(cursor)

    @property
    def waited_seconds(self) -> float:
        return 0.0 if self._ahead is None else self._ahead.waited_seconds

    def __enter__(self) -> "Reading":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._ahead is not None:
            # A read that hangs must not keep back what has failed.
            self._ahead.close(wait=kind is None)


def open_reading(config: PhaseConfig, corpus: Corpus | TokenCorpus, progress: Progress, mesh: Mesh) -> Reading:
    """What this rank reads from `progress` on. Raises InvalidJobError where a source would be read more often than it
    may be."""
    if isinstance(corpus, Corpus):
        return Reading(Stream(corpus.train, config.model.sequence_length, config.data.seed))
    mixed = _stretch(config, progress)
    _check_epochs(config, corpus, progress, mixed)

    def parts(cursor: int) -> list[Part]:
        return rank_parts(config.batch, cursor, mesh.data_rank, mesh.layout.data)

    stream = MixedStream(mixed, _ordered(corpus.sources, progress), config.model.sequence_length)
    samples = AheadOfTraining(stream, parts, progress.cursor, config.batch.sequences)
    end = corpus.end_of_document
    count = None if end is None else _counting(config, samples, parts, end, mesh)
    return Reading(samples, mixed, count)


def _counting(config: PhaseConfig, samples: Samples, parts: Callable[[int], list[Part]], end: int, mesh: Mesh) -> Count:
    # In an order that is the same on all ranks.
    windows = [*dict.fromkeys(map(config.model.window_of, range(config.model.layers)))]

    def count(cursor: int) -> Counts:
        own = [count_documents(samples.windows(*part), end, windows) for part in parts(cursor)]
        return _over_all_ranks(reduce(add, own), mesh)

    return count


def _over_all_ranks(counts: Counts, mesh: Mesh) -> Counts:
    """The sums over the data ranks; the pipeline ranks of each have the same samples. No rank reads what only others
    train on. With clipping Global the ranks have agreed behind all passes of the step before, so that this sum waits
    for none; else they did before most backward passes, and on a GPU the sum waits for these."""
    numbers = torch.tensor([counts.targets, *counts.twice_the_pairs.values()], device=mesh.device)
    targets, *pairs = mesh.ranks.sum_(numbers if mesh.pipeline_rank == 0 else torch.zeros_like(numbers)).tolist()
    return Counts(targets, dict(zip(counts.twice_the_pairs, pairs, strict=True)))


def _stretch(config: PhaseConfig, progress: Progress) -> Stretch:
    """The samples of the phase. Where its mixture begins, `progress` is told so."""
    weights = config.mixtures[0].weights
    consumed = progress.consumed or {}
    if progress.cursor and not consumed:
        # Another job began it, on text.
        consumed = {"": progress.cursor}
    if progress.mixture_begin is None or progress.step == progress.begin:
        progress.mixture_begin = progress.cursor
        return stretch(progress.cursor, weights, consumed)
    return continued(progress.cursor, progress.mixture_begin, weights, consumed)


def _ordered(sources: Mapping[str, Source], progress: Progress) -> dict[str, Source]:
    """The sources, each in the order in which it was begun, wherever its files lie by now: another one would repeat and
    skip windows. `progress` is told the orders."""
    known = progress.blocks or {}
    begun = {name for name, count in (progress.consumed or {}).items() if count} - {*known}
    own = {n: source.order for n, source in sources.items() if n not in begun and source.order is not None}
    progress.blocks = {**own, **known} or None
    return {name: replace(source, order=(progress.blocks or {}).get(name)) for name, source in sources.items()}


def _check_epochs(config: PhaseConfig, corpus: TokenCorpus, progress: Progress, first: Stretch) -> None:
    step, cursor, ends = progress.step, progress.cursor, list[int]()
    for mixture in config.mixtures:
        cursor += max(0, mixture.last_step - step) * mixture.sequences
        step = max(step, mixture.last_step)
        ends.append(cursor)
    behind = [(end, mixture.weights) for end, mixture in zip(ends, config.mixtures[1:], strict=False)]
    samples = {name: source.samples for name, source in corpus.sources.items()}
    most = {source.name: source.max_epochs for source in config.data.sources if source.max_epochs is not None}
    check_epochs(planned(first, behind), ends[-1], samples, most)
