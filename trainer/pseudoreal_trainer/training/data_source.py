"""Data source of a phase: samples of a text, or of a mixture of token files with prefetching, and their batches.

The engine takes a batch one micro-batch at a time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from pseudoreal_api.resolved.config import PhaseConfig
from torch import Tensor

from pseudoreal_trainer.data.corpus import Corpus
from pseudoreal_trainer.data.documents import Counts, count_documents
from pseudoreal_trainer.data.order import PhaseSamples, check_epochs, continue_phase, phase_samples, project_phases
from pseudoreal_trainer.data.prefetch import Prefetch
from pseudoreal_trainer.data.sources import MixedStream, Source, StepOrder
from pseudoreal_trainer.data.stream import Part, Stream, rank_parts
from pseudoreal_trainer.data.token_corpus import TokenCorpus
from pseudoreal_trainer.data.tokens.reader import Tokens
from pseudoreal_trainer.engine.ranks.process_groups import ProcessGroups
from pseudoreal_trainer.plan.memory.pinned_arena import MicroBatchShape
from pseudoreal_trainer.training.progress import Progress


class Samples(Protocol):
    @property
    def sequence(self) -> int: ...

    def windows(self, first: int, end: int) -> NDArray[Any]:
        """Return the samples at the cursors first..end-1, [end - first, sequence + 1]."""


class PrefetchedSamples:
    """Samples of this rank, prefetched by a thread up to two steps ahead.

    The thread starts at the first request, so a rank without requests reads nothing. Request steps in order. The parts
    of the current step may be requested in any order, and repeatedly.
    """

    def __init__(self, stream: MixedStream, parts: Callable[[int], list[Part]], first: int, stride: int) -> None:
        """`parts`: function from a step's first cursor to this rank's parts of the step. `first`: cursor of the first
        step. `stride`: number of samples between the cursors of consecutive steps."""
        self.sequence = stream.sequence
        self._stream, self._order = stream, StepOrder(stream, parts, stride)
        self._cursor, self._stride = first, stride
        self._prefetch: Prefetch[dict[Part, Tokens]] | None = None
        self._step: dict[Part, Tokens] = {}

    def windows(self, first: int, end: int) -> Tokens:
        if (first, end) not in self._step:
            self._step = self._started_prefetch().take(self._cursor)
            self._cursor += self._stride
        return self._step[first, end]

    @property
    def waited_seconds(self) -> float:
        """Total seconds for which training has waited for samples."""
        return 0.0 if self._prefetch is None else self._prefetch.waited_seconds

    def close(self, *, wait: bool = True) -> None:
        """Stop the thread. `wait`: also wait for a read in progress to end."""
        if self._prefetch is not None:
            self._prefetch.close(wait=wait)

    def _started_prefetch(self) -> Prefetch[dict[Part, Tokens]]:
        if self._prefetch is None:
            self._prefetch = Prefetch(self._read, self._cursor, self._stride)
        return self._prefetch

    def _read(self, cursor: int) -> dict[Part, Tokens]:
        return {part: self._stream.read(places) for part, places in self._order.step(cursor).items()}


Count = Callable[[int], Counts]
"""Function: a step's first cursor -> the step's document counts over all ranks. Collective: all ranks call the
function."""


class DataSource:
    """Samples of a phase, their document counts, and the number of samples consumed from each source. A context
    manager."""

    def __init__(
        self, samples: Stream | PrefetchedSamples, mixed: PhaseSamples | None = None, count: Count | None = None
    ) -> None:
        """`count` is None if attention spans whole sequences."""
        self.samples: Samples = samples
        self._ahead = samples if isinstance(samples, PrefetchedSamples) else None
        self._stretch, self._count = mixed, count

    def count(self, cursor: int) -> Counts | None:
        """Return the document counts, over all ranks, of the step that starts at the cursor; None if attention spans
        whole sequences.

        Collective: every rank calls this, once per step and in step order.
        """
        return None if self._count is None else self._count(cursor)

    def consumed(self, cursor: int) -> dict[str, int] | None:
        """Return source name -> number of samples consumed before the cursor, since the start of the job; None if the
        corpus is text."""
        return None if self._stretch is None else self._stretch.consumed(cursor)

    @property
    def waited_seconds(self) -> float:
        return 0.0 if self._ahead is None else self._ahead.waited_seconds

    def __enter__(self) -> "DataSource":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._ahead is not None:
            # After a failure, do not wait: a read that hangs must not delay the report of the error.
            self._ahead.close(wait=kind is None)


def open_data_source(
    config: PhaseConfig, corpus: Corpus | TokenCorpus, progress: Progress, groups: ProcessGroups
) -> DataSource:
    """Open this rank's data source at `progress`.

    Raises InvalidJobError if a source would be read for more epochs than its `maxEpochs` allows.
    """
    if isinstance(corpus, Corpus):
        return DataSource(Stream(corpus.train, config.model.sequence_length, config.data.seed))
    mixed = _enter_mixture(config, progress)
    _check_epochs(config, corpus, progress, mixed)

    def parts(cursor: int) -> list[Part]:
        return rank_parts(config.batch, cursor, groups.sequence_group, groups.layout.mesh.sequence_groups)

    stream = MixedStream(mixed, _fix_orders(corpus.sources, progress), config.model.sequence_length)
    samples = PrefetchedSamples(stream, parts, progress.cursor, config.batch.sequences)
    end = corpus.end_of_document
    count = None if end is None else _document_counter(config, samples, parts, end, groups)
    return DataSource(samples, mixed, count)


def _document_counter(
    config: PhaseConfig, samples: Samples, parts: Callable[[int], list[Part]], end: int, groups: ProcessGroups
) -> Count:
    # dict.fromkeys keeps the order of layers, so all ranks sum the same window sizes at the same place.
    windows = [*dict.fromkeys(map(config.model.window_of, range(config.model.layers)))]

    def count(cursor: int) -> Counts:
        own = [count_documents(samples.windows(*part), end, windows) for part in parts(cursor)]
        return _sum_over_ranks(reduce(add, own), groups)

    return count


def _sum_over_ranks(counts: Counts, groups: ProcessGroups) -> Counts:
    """Return the counts summed over the sequences of all ranks.

    The pipeline ranks of a data rank have the same samples, and so have the context ranks, so only the first of each
    contributes. Each rank counts only its own samples. With global clipping, the ranks agreed after all passes of the
    previous step, so this sum waits for no passes. With other clipping, the ranks agreed before most backward passes,
    and on a GPU this sum waits for these passes.
    """
    numbers = torch.tensor([counts.targets, *counts.twice_the_pairs.values()], device=groups.device)
    contributes = groups.pipeline_rank == groups.sequence_coordinate == 0
    targets, *pairs = groups.ranks.sum_(numbers if contributes else torch.zeros_like(numbers)).tolist()
    return Counts(targets, dict(zip(counts.twice_the_pairs, pairs, strict=True)))


def _enter_mixture(config: PhaseConfig, progress: Progress) -> PhaseSamples:
    """Return the sample range of the phase. At the start of the phase's mixture, record the cursor in `progress`."""
    weights = config.mixtures[0].weights
    consumed = progress.consumed or {}
    if progress.cursor and not consumed:
        # Samples of a text, which has no source names.
        consumed = {"": progress.cursor}
    if progress.mixture_begin is None or progress.step == progress.begin:
        progress.mixture_begin = progress.cursor
        return phase_samples(progress.cursor, weights, consumed)
    return continue_phase(progress.cursor, progress.mixture_begin, weights, consumed)


def _fix_orders(sources: Mapping[str, Source], progress: Progress) -> dict[str, Source]:
    """Record the reading order of new sources in `progress`; return all sources in their recorded order.

    A source keeps its recorded order, even if its files have been moved: another order would repeat some windows and
    skip others.
    """
    known = progress.blocks or {}
    begun = {name for name, count in (progress.consumed or {}).items() if count} - {*known}
    own = {n: source.order for n, source in sources.items() if n not in begun and source.order is not None}
    progress.blocks = {**own, **known} or None
    return {name: replace(source, order=(progress.blocks or {}).get(name)) for name, source in sources.items()}


def _check_epochs(config: PhaseConfig, corpus: TokenCorpus, progress: Progress, first: PhaseSamples) -> None:
    step, cursor, ends = progress.step, progress.cursor, list[int]()
    for mixture in config.mixtures:
        cursor += max(0, mixture.last_step - step) * mixture.sequences
        step = max(step, mixture.last_step)
        ends.append(cursor)
    later = [(end, mixture.weights) for end, mixture in zip(ends, config.mixtures[1:], strict=False)]
    samples = {name: source.samples for name, source in corpus.sources.items()}
    most = {source.name: source.max_epochs for source in config.data.sources if source.max_epochs is not None}
    check_epochs(project_phases(first, later), ends[-1], samples, most)


@dataclass(frozen=True)
class StreamBatch:
    """Training samples of this data rank for one step."""

    samples: Samples
    parts: list[tuple[int, int]]
    """Range of sample cursors of each micro-batch, (first, end), `end` excluded."""

    def shape(self, micro_batch: int) -> MicroBatchShape:
        first, end = self.parts[micro_batch]
        return end - first, self.samples.sequence

    def tokens(self, micro_batch: int) -> Tensor:
        return _as_ids(self.samples.windows(*self.parts[micro_batch]))


@dataclass(frozen=True)
class WindowBatch:
    """Validation windows. Each window is a micro-batch of its own, so its loss is independent of the other windows."""

    windows: list[NDArray[Any]]
    """Validation windows, bytes or token ids, each [T + 1]."""

    def shape(self, micro_batch: int) -> MicroBatchShape:
        return 1, len(self.windows[micro_batch]) - 1

    def tokens(self, micro_batch: int) -> Tensor:
        return _as_ids(self.windows[micro_batch][None])


def _as_ids(windows: NDArray[Any]) -> Tensor:
    """Convert bytes or token ids [B, T + 1] to int64 token ids."""
    return torch.from_numpy(windows).to(torch.int64)
