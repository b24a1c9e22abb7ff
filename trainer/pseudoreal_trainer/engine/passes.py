"""Forward and backward passes of a rank, and the tensors passed between them. Main thread only."""

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from pseudoreal_trainer.engine.activation_offload import ActivationOffload, Key
from pseudoreal_trainer.engine.chunks import Chunk, ChunkedLayer, chunks_of, parts_of
from pseudoreal_trainer.engine.copies import Copies
from pseudoreal_trainer.engine.gradient_similarity import SimilarityProbe
from pseudoreal_trainer.engine.gradients import Agreement, Gradients
from pseudoreal_trainer.engine.ranks.context import PartExchange
from pseudoreal_trainer.engine.ranks.messages import Messages
from pseudoreal_trainer.engine.ranks.streams import Event, Streams, synchronize
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.router_statistics import ChoiceCounts
from pseudoreal_trainer.engine.state.pinned import Allocator, Block
from pseudoreal_trainer.model.attention import Documents, Scope, find_documents
from pseudoreal_trainer.model.context import ContextCut
from pseudoreal_trainer.model.experts import RouterStatistics, SavedDecision
from pseudoreal_trainer.model.loss import IGNORED, Loss, Losses, sum_of
from pseudoreal_trainer.model.modules import Modules
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.memory.pinned_arena import MicroBatchShape, token_bytes
from pseudoreal_trainer.plan.records import Backward, Flow, Forward, Record


class Batch(Protocol):
    """One data rank's part of a batch."""

    def shape(self, micro_batch: int) -> MicroBatchShape: ...

    def tokens(self, micro_batch: int) -> Tensor:
        """Return the inputs and, shifted by one token, the targets of a micro-batch: [B, T + 1], on host or device.
        Called once per micro-batch in each run of a plan."""


@dataclass(frozen=True)
class Training:
    """Arguments of a training step besides its batch."""

    tokens: int
    """Number of tokens in the whole batch, over all ranks. The backward pass divides the auxiliary losses by this
    number, because these losses also count tokens without a target."""
    rate: float
    """Learning rate."""
    stop: bool
    """Whether a stop was requested on this rank."""
    finish: bool = False
    """Whether the end of the phase was requested on this rank."""
    ignored: int = 0
    """Number of tokens without a target, because they end documents."""

    @property
    def targets(self) -> int:
        """Number of tokens with a target, by which the backward pass divides the loss. At least 1, because a batch may
        consist of empty documents."""
        return max(1, self.tokens - self.ignored)


@dataclass(frozen=True)
class Graph:
    """Autograd graph of a position's pass, for the backward pass."""

    input: Tensor
    """[B, T, H]; for the embedding the token ids, [B, T]."""
    output: Tensor
    """[B, T, H]"""
    statistics: RouterStatistics | None = None


@dataclass
class PlanRun:
    """State of one run of a plan: its batch, and the tensors that passes have produced and not yet consumed."""

    batch: Batch
    training: Training | None
    """Arguments of the training step; None: evaluation, which has forward passes only."""
    reads: Sequence[int] | None = None
    """Entry m: index of the token in micro-batch m after which the logits are computed; each micro-batch has one
    sequence. None: losses are computed."""
    probe: SimilarityProbe | None = None
    """Probe of a measuring plan; None: nothing is measured."""
    tokens: dict[int, Tensor] = field(default_factory=dict)
    """Micro-batch -> token ids, [B, T + 1], on the device."""
    scopes: dict[int, Scope | None] = field(default_factory=dict)
    """Micro-batch -> scope of its attention; None: whole sequences."""
    documents: dict[int, Documents] = field(default_factory=dict)
    """Micro-batch -> documents of its whole sequences; empty if attention spans whole sequences."""
    chunks: dict[int, Sequence[Chunk]] = field(default_factory=dict)
    """Micro-batch -> chunks of this rank's parts of its sequences; empty if no layer is computed in chunks."""
    inputs: dict[Key, Tensor] = field(default_factory=dict)
    """(position, micro-batch) -> input of the position, [B, T, H], on the device."""
    gradients: dict[Key, Tensor] = field(default_factory=dict)
    """(position, micro-batch) -> gradient of the position's input, [B, T, H]."""
    graphs: dict[Key, Graph] = field(default_factory=dict)
    """(position, micro-batch) -> graph of a pass that is not recomputed."""
    routing_decisions: dict[Key, SavedDecision] = field(default_factory=dict)
    """(position, micro-batch) -> routing decision of a pass, until the pass is recomputed."""
    choice_counts: ChoiceCounts = field(default_factory=ChoiceCounts)
    router_statistics: dict[int, Tensor] = field(default_factory=dict)
    """Position with experts -> router statistics, summed over the micro-batches so far, [experts +
    RouterStatistics.OTHERS], float64."""
    losses: dict[int, Losses] = field(default_factory=dict)
    """Micro-batch -> loss sums over its tokens; on the head's rank only."""
    logits: dict[int, Tensor] = field(default_factory=dict)
    """Micro-batch -> logits after its token `reads[m]`, [V]; only on the head's rank with this token."""
    reduced: dict[int, Future[None]] = field(default_factory=dict)
    """Unit -> its reduction; the future completes once the sum of the unit's gradient is in the unit's home."""
    agreement: Future[Agreement] | None = None
    """Agreement of all ranks on a training step; None before its Agree record."""

    @property
    def training_step(self) -> Training:
        assert self.training is not None, "only records of training plans read it"
        return self.training

    def tensors_of(self, flow: Flow) -> dict[Key, Tensor]:
        """Return (position, micro-batch) -> tensor of this rank that this flow can send to another pipeline rank: the
        input of the position, or its gradient."""
        return self.inputs if flow is Flow.ACTIVATION else self.gradients

    def add_router_statistics(self, position: int, sums: Tensor) -> None:
        """Add the router statistics of one pass, [experts + RouterStatistics.OTHERS]."""
        self.router_statistics[position] = (
            self.router_statistics[position] + sums if position in self.router_statistics else sums
        )

    def loss_sums(self) -> Losses | None:
        """Return the loss sums over this rank's tokens; None without the head."""
        return sum_of(list(self.losses.values())) if self.losses else None


class TokenBuffer:
    """Host memory for the tokens of all micro-batches of a run.

    Pinned, because a copy from pageable memory would wait for all passes launched so far. Without a GPU, tokens stay in
    their own memory, and no memory is allocated here.
    """

    def __init__(self, streams: Streams, device: torch.device, memory: Allocator) -> None:
        self._streams, self._device, self._memory = streams, device, memory
        self._block = Block(0, memory)
        self._used = 0
        """Bytes that the current run has used."""
        self._copied: Event = None
        """Event after which all copies launched so far are done."""

    def prepare(self, shapes: Sequence[MicroBatchShape]) -> None:
        """Allocate memory for micro-batches of these shapes, unless there is enough.

        Call this before the first pass of a run. Pinning memory waits for all kernels of the device, and a kernel may
        wait for a message that depends on this rank's later calls.
        """
        # This wait is short: at most a few passes precede the last copies of the previous run.
        synchronize(self._copied)
        self._used, needed = 0, token_bytes(shapes)
        if self._block.size < needed:
            self._block.close()
            self._block = Block(needed, self._memory)

    def to_device(self, tokens: Tensor) -> Tensor:
        """Return the tokens, [B, T + 1], on the device."""
        if not self._streams.are_real or tokens.device.type != "cpu":
            return tokens
        begin, self._used = self._used, self._used + tokens.nbytes
        pinned = self._block.memory[begin : self._used].view(tokens.dtype).view(tokens.shape)
        pinned.copy_(tokens)
        there = torch.empty(tokens.shape, dtype=tokens.dtype, device=self._device)
        there.copy_(pinned, non_blocking=True)
        self._copied = self._streams.record_event()
        return there

    def close(self) -> None:
        self._block.close()


@dataclass(frozen=True)
class Passes:
    """Forward and backward passes of one rank. Main thread only."""

    layout: Layout
    modules: Modules
    copies: Copies
    gradients: Gradients
    messages: Messages
    offload: ActivationOffload
    tokens: TokenBuffer
    streams: Streams
    trace: Trace
    loss: Loss
    context: PartExchange
    coordinate: int
    """Index of this rank's part of the tokens of each of its sequences."""
    end_of_document: int | None = None
    """Token id that ends a document; attention stays within documents. None: attention spans whole sequences."""

    def forward(self, run: PlanRun, record: Forward) -> None:
        position, m = record.position, record.micro_batch
        self._bind(position)
        if position > 0:
            self.await_message(run, Flow.ACTIVATION, position, m)
        with self.computing(record, "evaluation" if run.training is None else "compute"):
            if position == self.layout.head:
                self._head_forward(run, m)
            else:
                run.inputs[position + 1, m] = self._layer_forward(run, position, m)

    def backward(self, run: PlanRun, record: Backward) -> None:
        position, m = record.position, record.micro_batch
        self._bind(position)
        if position != self.layout.head:
            self.await_message(run, Flow.GRADIENT, position + 1, m)
        with self.computing(record):
            if position == self.layout.head:
                self._head_backward(run, m)
            else:
                self._layer_backward(run, position, m)

    def _head_forward(self, run: PlanRun, m: int) -> None:
        hidden, head = run.inputs.pop((self.layout.head, m)), self.modules.head  # [B, T, H]
        if run.reads is None:
            run.losses[m] = Losses(self.loss.cross_entropy(head, hidden, self._targets(run, m)), None)
            return
        index = self._index_of(run, m, run.reads[m])
        if index is not None:
            run.logits[m] = self.loss.logits(head, hidden[:, index])[0]
        elif self.layout.slices_vocabulary:
            self.loss.logits(head, torch.zeros_like(hidden[:, 0]))

    def _layer_backward(self, run: PlanRun, position: int, m: int) -> None:
        if (layer := self._in_chunks(run, position, m)) is not None:
            self._backward_in_chunks(run, position, m, layer)
            return
        graph, gradient = self._graph(run, position, m)
        statistics, trained = graph.statistics, self._trained(position)
        sources = [*([graph.input] if position > 0 else []), *trained, *([statistics.sums] if statistics else [])]
        # With tied embeddings, the embedding's unit also contains the final norm, which the embedding does not use.
        gradients = [*torch.autograd.grad(graph.output, sources, gradient, allow_unused=position == 0)]
        if position > 0:
            run.gradients[position, m] = gradients.pop(0)
        sums = gradients.pop() if statistics else None
        for unit in self.layout.units_of(position):
            count = len(self.modules.of(unit).trained)
            own, gradients = gradients[:count], gradients[count:]
            # Router statistics belong to the block, the first unit: the router is part of it.
            self.add_gradients(run, position, unit, own, sums)
            sums = None

    def _backward_in_chunks(self, run: PlanRun, position: int, m: int, layer: ChunkedLayer) -> None:
        (unit,) = self.layout.units_of(position)
        gradient, source = run.gradients.pop((position + 1, m)), self.take_input(run, position, m)
        run.gradients[position, m] = layer.backward(
            source.detach(),
            gradient,
            self.modules.of(unit).trained,
            lambda gradients: self.add_gradients(run, position, unit, gradients),
        )

    def add_gradients(
        self, run: PlanRun, position: int, unit: int, gradients: Sequence[Tensor | None], sums: Tensor | None = None
    ) -> None:
        """Add one pass's gradients to the accumulator of a unit. `sums`: router statistics of the pass."""
        own, module = [*gradients], self.modules.of(unit)
        if run.probe is not None:
            run.probe.accumulate(position, unit, own)
        if sums is not None:
            run.add_router_statistics(position, sums)
            if len(module.parameters) > len(module.trained):
                # The update of the balancing bias follows from token counts, which are accumulated and reduced like a
                # gradient.
                own.append(sums[: -RouterStatistics.OTHERS])
        self.gradients.accumulate(unit, own)

    def _trained(self, position: int) -> list[Tensor]:
        """Return the parameters that the position trains, unit after unit."""
        return [one for unit in self.layout.units_of(position) for one in self.modules.of(unit).trained]

    def _head_backward(self, run: PlanRun, m: int) -> None:
        (unit,) = self.layout.units_of(self.layout.head)
        parameters = self.modules.of(unit).parameters

        def take(parameter: Tensor, gradient: Tensor) -> None:
            self.gradients.accumulate(unit, [gradient if one is parameter else None for one in parameters])

        source, head = self.take_input(run, self.layout.head, m), self.layout.head
        run.losses[m], run.gradients[head, m] = self.loss.backward(
            self.modules.head, source, self._targets(run, m), run.training_step.targets, take
        )

    def _bind(self, position: int) -> None:
        """Bind the position's modules to the weights of its units; waits for their fetches."""
        for unit in self.layout.units_of(position):
            self.copies.bind(unit, self.modules.of(unit))

    def await_message(self, run: PlanRun, flow: Flow, position: int, micro_batch: int) -> None:
        """Wait for a tensor from another pipeline rank. Does nothing if the tensor was received before or is computed
        on this rank."""
        here = run.tensors_of(flow)
        if (position, micro_batch) not in here:
            here[position, micro_batch] = self.messages.take((flow, position, micro_batch))

    def _layer_forward(self, run: PlanRun, position: int, m: int) -> Tensor:
        """Return the output of a position, [B, T, H]. In training, keep the position's input or graph for the backward
        pass."""
        key = (position, m)
        if run.training is None or position == 0:
            source = self._input_tokens(run, m) if position == 0 else run.inputs.pop(key)
            with torch.no_grad():
                return self._compute(run, position, m, source)
        saved = SavedDecision() if self.layout.has_experts(position) else None
        output = (self._forward_without_graph if self.layout.recompute else self._forward_with_graph)(run, key, saved)
        if saved is not None and saved.decision is not None:
            run.choice_counts.add(position, saved.decision)
        return output

    @torch.no_grad()
    def _forward_without_graph(self, run: PlanRun, key: Key, saved: SavedDecision | None) -> Tensor:
        output = self._compute(run, *key, run.inputs[key], saved=saved)
        if saved is not None:
            run.routing_decisions[key] = saved
        return output

    def _forward_with_graph(self, run: PlanRun, key: Key, saved: SavedDecision | None) -> Tensor:
        source = run.inputs.pop(key).requires_grad_()
        with self.copies.saving():
            graph = run.graphs[key] = self._training_pass(run, *key, source, saved, is_output_read=True)
        return graph.output.detach()

    def _graph(self, run: PlanRun, position: int, m: int) -> tuple[Graph, Tensor]:
        """Return the graph of a position, recomputed unless it was kept, and the gradient of its output, [B, T, H]."""
        gradient = run.gradients.pop((position + 1, m))
        if (graph := run.graphs.pop((position, m), None)) is not None:
            return graph, gradient
        source = self._input_tokens(run, m) if position == 0 else self.take_input(run, position, m)
        decision = run.routing_decisions.pop((position, m), None)
        return self._training_pass(run, position, m, source, decision, is_output_read=False), gradient

    def _training_pass(
        self, run: PlanRun, position: int, m: int, source: Tensor, saved: SavedDecision | None, *, is_output_read: bool
    ) -> Graph:
        statistics = self.new_statistics(run, position, source) if position > 0 else None
        output = self._compute(run, position, m, source, statistics, saved, is_output_read=is_output_read)
        return Graph(source, output, statistics)

    def new_statistics(self, run: PlanRun, position: int, source: Tensor) -> RouterStatistics | None:
        """Return the router statistics of a training pass of a layer on `source`; None if the layer has no experts."""
        choices = partial(run.choice_counts.of, position)
        return self.modules.router_statistics(position - 1, run.training_step.tokens, source.device, choices)

    def computing(self, record: Record, lane: str = "compute") -> AbstractContextManager[None]:
        """Return a context for launching kernels. The trace records their time under the plan record."""
        return self.trace.gpu_span(lane, record, self.streams)

    def take_input(self, run: PlanRun, position: int, m: int) -> Tensor:
        """Return the input of a position, [B, T, H], for the backward pass, its last reader."""
        returned = self.offload.take_reloaded((position, m))
        source = run.inputs.pop((position, m)) if returned is None else returned
        return source.detach().requires_grad_()

    def _input_tokens(self, run: PlanRun, m: int) -> Tensor:
        """Return the tokens of a micro-batch that this rank's embedding looks up: [B, T], or [B, K T] with a slice of
        the vocabulary and K tensor ranks."""
        return self._at_the_ends(run, m, self._tokens(run, m)[:, :-1])

    def _targets(self, run: PlanRun, m: int) -> Tensor:
        """Return the targets of the tokens for which this rank computes the loss: [B, T], or [B, K T] with a slice of
        the vocabulary and K tensor ranks. The end of a document has no target: the next token belongs to another
        document."""
        tokens = self._tokens(run, m)
        targets = tokens[:, 1:]
        if self.end_of_document is not None:
            targets = targets.masked_fill(tokens[:, :-1] == self.end_of_document, IGNORED)
        return self._at_the_ends(run, m, targets)

    def _at_the_ends(self, run: PlanRun, m: int, tokens: Tensor) -> Tensor:
        """Return the part of each row of `tokens`, whole sequences [B, T], for which this rank computes embeddings and
        losses: its own part; with a slice of the vocabulary, the parts of all its tensor ranks."""
        cut = self.cut(run.batch.shape(m)[1]) if self.layout.slices_vocabulary else self._cut_of(run, m)
        return tokens if cut is None else cut.own(tokens)

    def cut(self, length: int) -> ContextCut | None:
        """Return the cut of sequences of `length` tokens over context ranks; None if they are whole."""
        ranks = self.layout.context_ranks
        return None if ranks == 1 else ContextCut(ranks, self.coordinate // self.layout.tensor_ranks, length)

    def _cut_of(self, run: PlanRun, m: int) -> ContextCut | None:
        """Return the cut of a micro-batch's sequences over context ranks and tensor ranks; None: this rank has all of
        their tokens."""
        ranks = self.layout.sequence_ranks
        return None if ranks == 1 else ContextCut(ranks, self.coordinate, run.batch.shape(m)[1])

    def _index_of(self, run: PlanRun, m: int, token: int) -> int | None:
        """Return the index of a token of whole sequences in this rank's part of them; None if another rank has it."""
        cut = self._cut_of(run, m)
        return token if cut is None else cut.index_of(token)

    def shape(self, run: PlanRun, m: int) -> MicroBatchShape:
        """Return the number of sequences of a micro-batch, and this rank's number of tokens in each sequence."""
        sequences, length = run.batch.shape(m)
        return sequences, length // self.layout.sequence_ranks

    def _tokens(self, run: PlanRun, m: int) -> Tensor:
        """Return the tokens of whole sequences, [B, T + 1], on the device."""
        if m not in run.tokens:
            tokens = run.batch.tokens(m)
            run.tokens[m] = self.tokens.to_device(tokens)
            if self.end_of_document is not None:
                run.documents[m] = find_documents(tokens, self.end_of_document, run.tokens[m])
        return run.tokens[m]

    def scope(self, run: PlanRun, m: int) -> Scope | None:
        """Return the scope of attention in a micro-batch: documents, or with context ranks parts of sequences; None:
        whole sequences.

        Each pipeline rank reads the token ids and finds the documents itself: sending documents between ranks would add
        a message for passes to wait for.
        """
        if m not in run.scopes:
            run.scopes[m] = self.scope_of(run.batch.shape(m)[1], self._documents(run, m))
        return run.scopes[m]

    def scope_of(self, length: int, documents: Documents | None) -> Scope | None:
        """Return the scope of attention in sequences of `length` tokens. `documents`: documents of the whole sequences;
        None: attention spans whole sequences."""
        if (cut := self.cut(length)) is None:
            return documents
        return parts_of(cut.chunks, length, documents, self.streams.device, partial(self.context.gather, cut))

    def _in_chunks(self, run: PlanRun, position: int, m: int) -> ChunkedLayer | None:
        """Return the layer at a position, to be computed in chunks of the sequence; None if it is computed at once."""
        sequences, length = run.batch.shape(m)
        # The probe takes the gradients of a whole pass.
        if not self.is_in_chunks(position) or not sequences or run.probe is not None:
            return None
        if m not in run.chunks:
            run.chunks[m] = self.chunks_of(length, self._documents(run, m))
        return self.chunked_layer(position, length, run.chunks[m], self.scope(run, m))

    def is_in_chunks(self, position: int) -> bool:
        """Return whether steps compute the layer at a position in chunks of the sequence."""
        return self.layout.sequence_chunks > 1 and self.layout.is_dense(position)

    def chunks_of(self, length: int, documents: Documents | None) -> list[Chunk]:
        """Return the chunks of this rank's parts of sequences of `length` tokens. `documents`: as in `scope_of`."""
        cut = self.cut(length)
        tokens = (range(length),) if cut is None else cut.chunks
        return chunks_of(tokens, length, documents, self.layout.sequence_chunks, self.streams.device)

    def chunked_layer(self, position: int, length: int, chunks: Sequence[Chunk], scope: Scope | None) -> ChunkedLayer:
        """Return the layer at a position, to be computed in `chunks` of sequences of `length` tokens. `scope`: from
        `scope_of`."""
        return ChunkedLayer(self.modules, position - 1, chunks, scope, self.cut(length), self.context)

    def _documents(self, run: PlanRun, m: int) -> Documents | None:
        """Return the documents of whole sequences; None if attention spans whole sequences."""
        if self.end_of_document is None:
            return None
        self._tokens(run, m)
        return run.documents[m]

    def _compute(
        self,
        run: PlanRun,
        position: int,
        m: int,
        source: Tensor,
        statistics: RouterStatistics | None = None,
        saved: SavedDecision | None = None,
        *,
        is_output_read: bool = True,
    ) -> Tensor:
        if position == 0:
            return self.modules.embed(source)
        if not torch.is_grad_enabled() and (layer := self._in_chunks(run, position, m)) is not None:
            return layer.forward(source)
        scope = self.scope(run, m)
        return self.modules.block(source, position - 1, statistics, scope, saved, is_output_read=is_output_read)
