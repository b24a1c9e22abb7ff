"""Bytes of activations over a step, and over a validation: walks through a rank's plan. Pure.

Independent of `plan.effects` and of allocation: the walk knows the tensors that a pass leaves, not their buffers.
"""

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate

from pseudoreal_trainer.plan.expert_parallel import PassPart
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.lower import evaluation_plan, step_plan
from pseudoreal_trainer.plan.memory.autograd_memory import autograd_memory_by_position
from pseudoreal_trainer.plan.memory.expert_parallel import Change, ExpertParallelBytes
from pseudoreal_trainer.plan.memory.tiers import Tiers
from pseudoreal_trainer.plan.records import (
    Backward,
    Count,
    Forward,
    RankPlan,
    Receive,
    Record,
    Stash,
    SumChoices,
    Unstash,
)
from pseudoreal_trainer.plan.sizes import Sizes

PENDING_OFFLOADS = 2
"""Maximum number of boundary activations on a GPU with a pending copy to the host, besides the newest one."""


def max_offloaded_activations(records: RankPlan) -> int:
    """Return the maximum number of boundary activations that are on the host at a time."""
    changes = (isinstance(record, Stash) - isinstance(record, Unstash) for record in records)
    return max(accumulate(changes), default=0)


def activation_peak(layout: Layout, sizes: Sizes, rank: int, records: RankPlan) -> Tiers:
    """Return the peak bytes of activations, including the temporary tensors of a running pass, on the data rank with
    the largest part of a micro-batch."""
    tokens = sizes.max_tokens(layout)
    walk = _Walk(layout, sizes, tokens, rank)
    for record in records:
        walk.take(record)
    leaving = PENDING_OFFLOADS * sizes.boundary(tokens) if layout.stash and sizes.device == "accelerator" else 0
    on_host = max_offloaded_activations(records) * sizes.boundary_unrounded(tokens)
    return Tiers(walk.peak + leaving, on_host, pinned=on_host if sizes.device == "accelerator" else 0)


class _Walk:
    def __init__(self, layout: Layout, sizes: Sizes, tokens: int, rank: int) -> None:
        self._layout, self._sizes, self._rank, self._boundary = layout, sizes, rank, sizes.boundary(tokens)
        is_selective = layout.keep == "Products"
        self._graphs = autograd_memory_by_position(
            sizes,
            tokens,
            layout.loss_chunk,
            is_selective=is_selective,
            context_ranks=layout.context_ranks,
            tensor_ranks=layout.tensor_ranks,
        )
        chunk = -(-(sizes.model.sequence_length // layout.context_ranks) // layout.sequence_chunks)
        self._of_chunks = autograd_memory_by_position(
            sizes, sizes.max_sequences(layout) * chunk, context_ranks=layout.context_ranks, chunk=chunk
        )
        self._changes: dict[tuple[int, PassPart], Change] = {}
        """(kind of layer, part of a pass through expert-parallel experts) -> bytes that the part changes."""
        self._held = self.peak = 0
        """Device bytes held now, and their maximum so far."""

    def take(self, record: Record) -> None:
        match record:
            case Receive():
                self._hold(self._boundary)
            case _ if (change := self._of_spread(record)) is not None:
                self._hold(change.held, briefly=change.briefly)
                self._hold(-change.freed)
            case Forward():
                # The output is the next position's input, or a sent message, which lives until its gradient arrives.
                self._hold(
                    self._boundary
                    + self._saved_graph_bytes(record.position)
                    + self._saved_routing_bytes(record.position)
                )
            case Backward():
                # The copy of the routing decision, kept since the forward pass, is freed: recomputation saves the
                # decision again, as part of the new graph.
                self._hold(-self._answered(record.position) - self._saved_routing_bytes(record.position))
                self._hold(0, briefly=self._during_backward(record.position))
                self._hold(-self._freed_by_backward(record.position))
            case SumChoices(position):
                self._hold(self._graphs[position].counts)
            case Stash():
                self._hold(-self._boundary)
            case Unstash():
                self._hold(self._boundary)

    def _of_spread(self, record: Record) -> Change | None:
        """Return the bytes changed by a part of a pass through expert-parallel experts; None for any other record."""
        if not isinstance(record, PassPart) or isinstance(record, Count) or not self._layout.spreads(record.position):
            return None
        graphs, saves_graph = self._graphs[record.position], self._saves_graph(record.position)
        # Layers of one kind share one graphs object.
        kind = id(graphs), replace(record, position=0, micro_batch=0)
        if kind not in self._changes:
            spread = ExpertParallelBytes(graphs, saves_graph, self._layout.expert_ranks, self._layout.expert_groups)
            self._changes[kind] = spread.change(record)
        change = self._changes[kind]
        if isinstance(record, Backward):
            change = replace(change, freed=change.freed + self._answered(record.position))
        return change

    def _hold(self, change: int, *, briefly: int = 0) -> None:
        self._held += change
        self.peak = max(self.peak, self._held + briefly)

    def _during_backward(self, position: int) -> int:
        if position == 0:
            return self._graphs[position].embedding_backward
        if position == self._layout.head:
            return self._graphs[position].head_backward
        # A step that measures computes layers at once.
        if self._layout.sequence_chunks > 1 and not self._layout.measures and self._layout.is_dense(position):
            of_graph = max(self._of_chunks[position].block_backward, self._graphs[position].keys_backward)
            return of_graph + self._graphs[position].beside_chunks
        absent = 0
        if self._saves_graph(position):
            absent = self._saved_graph_bytes(position) + self._boundary
        elif self._sizes.leaves_out_last_product(position - 1):
            absent = self._boundary  # a recomputed pass has no output
        return self._graphs[position].block_backward - absent

    def _answered(self, position: int) -> int:
        """Return the bytes of an output that was sent to another rank; 0 if the output stayed on this rank or is part
        of a graph."""
        was_sent = position < self._layout.head and not self._is_here(position + 1)
        return self._boundary if was_sent and not self._saves_graph(position) else 0

    def _freed_by_backward(self, position: int) -> int:
        """Return the bytes that the backward pass of a position frees: its graph, its input and the gradient of its
        output, minus the new gradient of its input."""
        inputs = int(position > 0)
        if position > 0 and self._is_here(position - 1) and self._saves_graph(position - 1):
            # The input is also the output saved in the graph of the previous position.
            inputs -= 1
        if self._saves_graph(position):
            inputs += 1
        gradients = int(position < self._layout.head) - int(position > 0)
        return self._saved_graph_bytes(position) + (inputs + gradients) * self._boundary

    def _saved_graph_bytes(self, position: int) -> int:
        return self._graphs[position].block if self._saves_graph(position) else 0

    def _saved_routing_bytes(self, position: int) -> int:
        """Return the bytes of the routing decision that a pass keeps for its recomputation."""
        is_kept = self._layout.has_experts(position) and not self._saves_graph(position)
        return self._graphs[position].routing if is_kept else 0

    def _saves_graph(self, position: int) -> bool:
        return not self._layout.recompute and 0 < position < self._layout.head

    def _is_here(self, position: int) -> bool:
        return self._layout.rank_of(position) == self._rank


def sequences_at_once(layout: Layout, sizes: Sizes) -> int:
    """Return the maximum number of sequences, each in a separate pass, that an evaluation can process at once without
    taking more device memory on any rank than the activations of a training step. At least 1, at most a data rank's
    sequences in a step."""
    at_home = replace(layout, homes=(), sharding="None")
    peaks = [activation_peak(at_home, sizes, rank, records).device for rank, records in enumerate(step_plan(at_home))]

    def exceeds(sequences: int) -> bool:
        plan = evaluation_plan(replace(at_home, micro_batches=sequences))
        return any(evaluation_peak(at_home, sizes, records) > peak for records, peak in zip(plan, peaks, strict=True))

    most = sizes.max_sequences(layout) * layout.micro_batches
    return max(1, bisect_right(range(1, most + 1), False, key=exceeds))


def evaluation_peak(layout: Layout, sizes: Sizes, records: RankPlan) -> int:
    """Return the peak bytes of a rank's activations in an evaluation plan. Each micro-batch of the plan is a single
    sequence."""
    tokens = sizes.model.sequence_length // layout.sequence_ranks
    boundary = sizes.boundary(tokens)
    graphs = autograd_memory_by_position(
        sizes,
        tokens,
        layout.loss_chunk,
        context_ranks=layout.context_ranks,
        tensor_ranks=layout.tensor_ranks,
    )
    held = peak = 0
    for record in records:
        match record:
            case Receive():
                held += boundary
            case Forward(position=0):
                held += boundary
                peak = max(peak, held)
            case Forward(position=position):
                is_head = position == layout.head
                # An upper bound: a backward pass includes its forward pass by recomputation, so its peak is at least as
                # high.
                bound = graphs[position].head_backward if is_head else graphs[position].block_backward
                peak = max(peak, held + bound)
                # The output replaces the input. Sent tensors live until the end of the plan.
                held -= boundary if is_head else 0
    return peak
