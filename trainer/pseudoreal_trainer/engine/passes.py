"""The passes of a rank: forward, backward, and what they leave for each other. Only the main thread is here."""

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from pseudoreal_trainer.engine.balance import StepChoices
from pseudoreal_trainer.engine.copies import Copies
from pseudoreal_trainer.engine.probe import Probe
from pseudoreal_trainer.engine.ranks.lanes import Lanes
from pseudoreal_trainer.engine.ranks.messages import Messages
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.stash import Key, StashedInputs
from pseudoreal_trainer.engine.tokens import TokenBuffer
from pseudoreal_trainer.engine.updates import Agreement, Gradients
from pseudoreal_trainer.forecast.memory.crossing import Shape
from pseudoreal_trainer.model.attention import Documents, documents_of
from pseudoreal_trainer.model.experts import KeptChoice, Tally
from pseudoreal_trainer.model.loss import IGNORED, Loss, Losses, sum_of
from pseudoreal_trainer.model.modules import Modules
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.records import Backward, Flow, Forward, Record


class Batch(Protocol):
    """This data rank's part of a batch."""

    def shape(self, micro_batch: int) -> Shape: ...

    def tokens(self, micro_batch: int) -> Tensor:
        """Inputs and, one token further, targets of a micro-batch: [B, T + 1], on the host or the device. Asked for
        once in a run."""


@dataclass(frozen=True)
class Training:
    """What a training step needs besides its batch."""

    tokens: int
    """Tokens of the whole batch, over all ranks: the divisor of auxiliary losses, which are of whole sequences."""
    rate: float
    """Learning rate."""
    stop: bool
    """Whether this rank was asked to stop."""
    finish: bool = False
    """Whether this rank was asked to end the phase."""
    ignored: int = 0
    """Those of the tokens that have no target, as they end documents."""

    @property
    def targets(self) -> int:
        """What the loss is divided by before the backward pass; at least 1, as a batch may consist of empty
        documents."""
        return max(1, self.tokens - self.ignored)


@dataclass(frozen=True)
class Graph:
    """A block's pass with everything that its backward pass needs."""

    input: Tensor
    """[B, T, H]; of the embedding: tokens, [B, T]."""
    output: Tensor
    """[B, T, H]"""
    tally: Tally | None = None


@dataclass
class PlanRun:
    """One run of a plan: what it computes on, and what its passes have made and not used up so far."""

    batch: Batch
    training: Training | None
    """What a training step needs; None: evaluation, which has forward passes alone."""
    reads: Sequence[int] | None = None
    """In an evaluation, for each micro-batch the position of the token whose logits are wanted, of its only sequence;
    None: losses are wanted."""
    probe: Probe | None = None
    """The probe of a measuring plan; None: nothing is measured."""
    tokens: dict[int, Tensor] = field(default_factory=dict)
    """Micro-batch -> its tokens, [B, T + 1], on the device."""
    documents: dict[int, Documents] = field(default_factory=dict)
    """Micro-batch -> its documents, where tokens attend within them."""
    inputs: dict[Key, Tensor] = field(default_factory=dict)
    """Input of each position that is on the device, [B, T, H]."""
    gradients: dict[Key, Tensor] = field(default_factory=dict)
    """Gradient of the input of each position, [B, T, H]."""
    graphs: dict[Key, Graph] = field(default_factory=dict)
    """The graphs of positions whose passes are not computed again."""
    choices: dict[Key, KeptChoice] = field(default_factory=dict)
    """The choices of experts of passes that are computed again, until they are."""
    choices_of_step: StepChoices = field(default_factory=StepChoices)
    loads: dict[int, Tensor] = field(default_factory=dict)
    """Position with experts -> the sums of its tallies over the micro-batches so far, [experts + Tally.OTHERS],
    float64."""
    losses: dict[int, Losses] = field(default_factory=dict)
    """Micro-batch -> sums over its tokens; on the rank of the head."""
    logits: dict[int, Tensor] = field(default_factory=dict)
    """Micro-batch -> the logits that are wanted, [V]; on the rank of the head."""
    agreement: Future[Agreement] | None = None
    """What all ranks agree on for a training step, from the record Agree on."""

    @property
    def training_step(self) -> Training:
        assert self.training is not None, "only a training plan asks"
        return self.training

    def crossing(self, flow: Flow) -> dict[Key, Tensor]:
        """What is here of that which passes between pipeline ranks: inputs of positions, or their gradients."""
        return self.inputs if flow is Flow.ACTIVATION else self.gradients

    def count(self, position: int, sums: Tensor) -> None:
        """Adds what a pass learned of its experts, [experts + Tally.OTHERS]."""
        self.loads[position] = self.loads[position] + sums if position in self.loads else sums

    def loss_sums(self) -> Losses | None:
        """The sums over this rank's tokens; None without the head."""
        return sum_of(list(self.losses.values())) if self.losses else None


@dataclass(frozen=True)
class Passes:
    layout: Layout
    modules: Modules
    copies: Copies
    gradients: Gradients
    messages: Messages
    stashed: StashedInputs
    tokens: TokenBuffer
    lanes: Lanes
    trace: Trace
    loss: Loss
    end_of_document: int | None = None
    """The token that ends documents, within which tokens attend; None: they attend in whole sequences."""
    tried: set[Shape] = field(default_factory=set)
    """Shapes of micro-batches whose passes were run on zeros."""

    def forward(self, run: PlanRun, record: Forward) -> None:
        position, m = record.position, record.micro_batch
        self._bind(position)
        if position > 0:
            self.await_message(run, Flow.ACTIVATION, position, m)
        with self.computing(record, "evaluation" if run.training is None else "compute"):
            if position == self.layout.head:
                self._evaluate_the_head(run, m)
            else:
                run.inputs[position + 1, m] = self._output(run, position, m)

    def backward(self, run: PlanRun, record: Backward) -> None:
        position, m = record.position, record.micro_batch
        self._bind(position)
        if position != self.layout.head:
            self.await_message(run, Flow.GRADIENT, position + 1, m)
        with self.computing(record):
            if position == self.layout.head:
                self._through_the_head(run, m)
            else:
                self._through(run, position, m)

    def _evaluate_the_head(self, run: PlanRun, m: int) -> None:
        hidden, head = run.inputs.pop((self.layout.head, m)), self.modules.head  # [B, T, H]
        if run.reads is None:
            run.losses[m] = Losses(self.loss.cross_entropy(head, hidden, self._targets(run, m)), None)
        else:
            run.logits[m] = self.loss.logits(head, hidden[:, run.reads[m]])[0]

    def _through(self, run: PlanRun, position: int, m: int) -> None:
        graph, gradient = self._graph(run, position, m)
        tally, trained = graph.tally, self._trained(position)
        sources = [*([graph.input] if position > 0 else []), *trained, *([tally.sums] if tally else [])]
        # The embedding's unit may be the head's as well, whose norm has no part in it.
        gradients = [*torch.autograd.grad(graph.output, sources, gradient, allow_unused=position == 0)]
        if position > 0:
            run.gradients[position, m] = gradients.pop(0)
        sums = gradients.pop() if tally else None
        for unit in self.layout.units_of(position):
            count = len(self.modules.of(unit).trained)
            own, gradients = gradients[:count], gradients[count:]
            # Those of a tally are of the router, and so of the block.
            self.add_gradients(run, position, unit, own, sums)
            sums = None

    def add_gradients(
        self, run: PlanRun, position: int, unit: int, gradients: Sequence[Tensor | None], sums: Tensor | None = None
    ) -> None:
        """Adds one pass's gradients to those of a unit. `sums`: what a tally learned in the pass."""
        own, module = [*gradients], self.modules.of(unit)
        if run.probe is not None:
            run.probe.accumulate(position, unit, own)
        if sums is not None:
            run.count(position, sums)
            if len(module.parameters) > len(module.trained):
                # What the balancing bias follows from is summed as gradients are.
                own.append(sums[: -Tally.OTHERS])
        self.gradients.accumulate(unit, own)

    def _trained(self, position: int) -> list[Tensor]:
        """The parameters that the position's gradients train: those of one unit behind those of the other."""
        return [one for unit in self.layout.units_of(position) for one in self.modules.of(unit).trained]

    def _through_the_head(self, run: PlanRun, m: int) -> None:
        (unit,) = self.layout.units_of(self.layout.head)
        parameters = self.modules.of(unit).parameters

        def take(parameter: Tensor, gradient: Tensor) -> None:
            self.gradients.accumulate(unit, [gradient if one is parameter else None for one in parameters])

        source, head = self.take_input(run, self.layout.head, m), self.layout.head
        run.losses[m], run.gradients[head, m] = self.loss.backward(
            self.modules.head, source, self._targets(run, m), run.training_step.targets, take
        )

    def _bind(self, position: int) -> None:
        """Gives the position's modules the weights of its units, once they are here."""
        for unit in self.layout.units_of(position):
            self.copies.bind(unit, self.modules.of(unit))

    def await_message(self, run: PlanRun, flow: Flow, position: int, micro_batch: int) -> None:
        """Waits for what another pipeline rank sends, unless it is here or is made here."""
        here = run.crossing(flow)
        if (position, micro_batch) not in here:
            here[position, micro_batch] = self.messages.take((flow, position, micro_batch))

    def _output(self, run: PlanRun, position: int, m: int) -> Tensor:
        """The output of a position, [B, T, H]. The position's input, or its graph, is kept for the backward pass."""
        key = (position, m)
        if run.training is None or position == 0:
            source = self._tokens(run, m)[:, :-1] if position == 0 else run.inputs.pop(key)
            with torch.no_grad():
                return self._compute(run, position, m, source)
        kept = KeptChoice() if self.layout.has_experts(position) else None
        output = (self._without_graph if self.layout.recompute else self._with_graph)(run, key, kept)
        if kept is not None and kept.choice is not None:
            run.choices_of_step.add(position, kept.choice)
        return output

    @torch.no_grad()
    def _without_graph(self, run: PlanRun, key: Key, kept: KeptChoice | None) -> Tensor:
        output = self._compute(run, *key, run.inputs[key], kept=kept)
        if kept is not None:
            run.choices[key] = kept
        return output

    def _with_graph(self, run: PlanRun, key: Key, kept: KeptChoice | None) -> Tensor:
        source = run.inputs.pop(key).requires_grad_()
        with self.copies.saving():
            graph = run.graphs[key] = self._training_pass(run, *key, source, kept)
        return graph.output.detach()

    def _graph(self, run: PlanRun, position: int, m: int) -> tuple[Graph, Tensor]:
        """The graph of a position, computed again unless it was kept, and the gradient of its output, [B, T, H]."""
        gradient = run.gradients.pop((position + 1, m))
        if (graph := run.graphs.pop((position, m), None)) is not None:
            return graph, gradient
        source = self._tokens(run, m)[:, :-1] if position == 0 else self.take_input(run, position, m)
        return self._training_pass(run, position, m, source, run.choices.pop((position, m), None)), gradient

    def _training_pass(
        self, run: PlanRun, position: int, m: int, source: Tensor, kept: KeptChoice | None = None
    ) -> Graph:
        tally = self.tally(run, position, source) if position > 0 else None
        return Graph(source, self._compute(run, position, m, source, tally, kept), tally)

    def tally(self, run: PlanRun, position: int, source: Tensor) -> Tally | None:
        """A tally for a training pass of a layer on `source`; None where it has no experts."""
        choices = partial(run.choices_of_step.of, position)
        return self.modules.tally(position - 1, run.training_step.tokens, source.device, choices)

    def computing(self, record: Record, lane: str = "compute") -> AbstractContextManager[None]:
        """A context whose kernels are those of the record."""
        return self.trace.executed(lane, record, self.lanes)

    def take_input(self, run: PlanRun, position: int, m: int) -> Tensor:
        """The input of a position, [B, T, H], for the backward pass, which is the last to need it."""
        returned = self.stashed.returned((position, m))
        source = run.inputs.pop((position, m)) if returned is None else returned
        return source.detach().requires_grad_()

    def _targets(self, run: PlanRun, m: int) -> Tensor:
        """The targets of a micro-batch, [B, T]. Behind the end of a document there is none: what comes then does not
        follow from it."""
        tokens = self._tokens(run, m)
        if self.end_of_document is None:
            return tokens[:, 1:]
        return tokens[:, 1:].masked_fill(tokens[:, :-1] == self.end_of_document, IGNORED)

    def _tokens(self, run: PlanRun, m: int) -> Tensor:
        if m not in run.tokens:
            tokens = run.batch.tokens(m)
            run.tokens[m] = self.tokens.bring(tokens)
            if self.end_of_document is not None:
                run.documents[m] = documents_of(tokens, self.end_of_document, run.tokens[m])
        return run.tokens[m]

    def documents(self, run: PlanRun, m: int) -> Documents | None:
        """The documents of a micro-batch. Each pipeline rank finds them in the tokens: it reads two or four bytes for
        each, where a message would be one more that passes can wait for."""
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
        tally: Tally | None = None,
        kept: KeptChoice | None = None,
    ) -> Tensor:
        if position == 0:
            return self.modules.embed(source)
        return self.modules.block(source, position - 1, tally, self.documents(run, m), kept)
