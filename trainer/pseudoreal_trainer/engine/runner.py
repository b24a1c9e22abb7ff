"""The loop that trains: takes the records of a step plan from first to last and does what they say."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from pseudoreal_trainer.engine.activations import Activations, Graph, StashRoom
from pseudoreal_trainer.engine.copies import Copies
from pseudoreal_trainer.engine.gradients import Gradients
from pseudoreal_trainer.engine.messages import Messages
from pseudoreal_trainer.engine.modules import Modules
from pseudoreal_trainer.engine.probe import Probe
from pseudoreal_trainer.engine.ranks.grid import Grid
from pseudoreal_trainer.engine.ranks.lanes import Lanes, Throttle
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.reductions import Agreement, Reductions
from pseudoreal_trainer.engine.state.memory import State
from pseudoreal_trainer.engine.state.pinned import Allocator, Region
from pseudoreal_trainer.engine.state.ring import RingRoom
from pseudoreal_trainer.engine.tokens import TokenRoom
from pseudoreal_trainer.engine.updates import Updates
from pseudoreal_trainer.engine.warm_up import warm_up
from pseudoreal_trainer.forecast.memory.activations import most_stashed
from pseudoreal_trainer.forecast.memory.crossing import Shape, takes_tokens
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.steps import (
    Agree,
    Backward,
    Drop,
    Fetch,
    Flow,
    Forward,
    Measure,
    RankPlan,
    Read,
    Receive,
    Reduce,
    Send,
    Stash,
    Tie,
    Unstash,
    Update,
)

_AHEAD = 2
"""Number of passes that are called ahead: enough that the GPU never waits for the thread that calls them."""


class Batch(Protocol):
    """This data rank's part of a batch."""

    def shape(self, micro_batch: int) -> Shape: ...

    def tokens(self, micro_batch: int) -> Tensor:
        """Inputs and, one token further, targets of a micro-batch: [B, T + 1], on the host or the device. Asked for
        once in a run."""


@dataclass(frozen=True)
class Parts:
    """The parts of an engine that the runner drives."""

    layout: Layout
    grid: Grid
    memory: Allocator
    """Allocator of the region and of the rooms for stashes, tokens and captures."""
    region: Region
    states: Mapping[int, State]
    modules: Modules
    copies: Copies
    gradients: Gradients
    reductions: Reductions
    updates: Updates
    messages: Messages
    stashes: StashRoom
    tokens: TokenRoom
    captures: RingRoom
    lanes: Lanes
    trace: Trace
    hidden: int
    master: torch.dtype
    compute: torch.dtype
    warm: set[Shape] = field(default_factory=set)
    """Shapes of micro-batches whose passes have been tried."""


@dataclass(frozen=True)
class Training:
    """What a training step needs besides its batch."""

    tokens: int
    """Tokens of the whole batch, over all ranks: the divisor of the loss before the backward pass."""
    rate: float
    """Learning rate."""
    stop: bool
    """Whether this rank was asked to stop."""
    finish: bool = False
    """Whether this rank was asked to end the phase."""


@dataclass
class Run:
    """One run of a plan."""

    parts: Parts
    batch: Batch
    training: Training | None
    """What a training step needs; None: evaluation, which has forward passes alone."""
    probe: Probe | None = None
    """The probe of a measuring plan; None: nothing is measured."""
    activations: Activations = field(init=False)
    throttle: Throttle = field(init=False)
    tokens: dict[int, Tensor] = field(default_factory=dict)
    """Micro-batch -> its tokens, [B, T + 1], on the device."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    """Micro-batch -> sum of the loss over its tokens in nats, a scalar; on the rank of the head."""
    agreement: Future[Agreement] | None = None

    def __post_init__(self) -> None:
        layout = self.parts.layout
        self.activations = Activations(self.parts.lanes, self.parts.trace, self.parts.stashes)
        self.throttle = Throttle(self.parts.lanes, _AHEAD if layout.stash or layout.pipeline > 1 else None)

    def go(self, plan: RankPlan) -> None:
        if self.parts.lanes.are_real and self.parts.layout.pipeline > 1:
            warm_up(self.parts, self.batch, plan)
        self._prepare(plan)
        for step in plan:
            _ACTIONS[type(step)](self, step)
            if isinstance(step, Forward | Backward):
                self.parts.copies.begin_ready()
                self.throttle.called()
        self.activations.finish()
        self.parts.messages.finish()

    def _prepare(self, plan: RankPlan) -> None:
        """Makes the host memory that depends on the batch, where there is none yet."""
        parts, stashes = self.parts, self.parts.layout.stash and self.training is not None
        takes = parts.lanes.are_real and takes_tokens(parts.layout, parts.grid.pipeline_rank)
        if not (takes or stashes):
            return
        shapes = [self.batch.shape(m) for m in {step.micro_batch for step in plan if isinstance(step, Forward)}]
        if takes:
            parts.tokens.prepare(shapes)
        if stashes:
            tokens = max(sequences * length for sequences, length in shapes)
            parts.stashes.prepare(most_stashed(plan), tokens * parts.hidden, parts.compute)

    @property
    def _training(self) -> Training:
        assert self.training is not None, "only a training plan asks"
        return self.training

    # Working copies, gradients, updates: the parts know how.

    def read(self, step: Read) -> None:
        self.parts.copies.read(step)

    def fetch(self, step: Fetch) -> None:
        self.parts.copies.fetch(step)

    def drop(self, step: Drop) -> None:
        self.parts.copies.drop(step)

    def reduce(self, step: Reduce) -> None:
        # The fetches before this record gather in the same group: every rank must call them before this sum.
        self.parts.copies.begin_all()
        self.parts.reductions.reduce(step, self.parts.gradients.reduce(step.unit), self.parts.updates.room)

    def measure(self, step: Measure) -> None:
        assert self.probe is not None, "only a measuring plan asks"
        self.parts.copies.begin_all()
        with self.parts.trace.executed("measure", step, self.parts.lanes):
            self.probe.finish(step.position)

    def tie(self, step: Tie) -> None:
        self.parts.reductions.tie(step)

    def agree(self, step: Agree) -> None:
        loss = torch.stack(list(self.losses.values())).sum() if self.losses else None
        stop, finish = self._training.stop, self._training.finish
        self.agreement = self.parts.reductions.agree(step, loss, stop=stop, finish=finish)

    def update(self, step: Update) -> None:
        self.parts.copies.updated[step.unit] = self.parts.updates.update(step, self._training.rate)

    def stash(self, step: Stash) -> None:
        self.activations.stash(step)

    def unstash(self, step: Unstash) -> None:
        self.activations.unstash(step, self.parts.grid.device)

    # Messages: an activation and its gradient have the shape of the micro-batch.

    def send(self, step: Send) -> None:
        here = self.activations.inputs if step.flow is Flow.ACTIVATION else self.activations.gradients
        self.parts.messages.send(step, here.pop((step.position, step.micro_batch)))

    def receive(self, step: Receive) -> None:
        self.parts.messages.receive(step, (*self.batch.shape(step.micro_batch), self.parts.hidden))

    def _await(self, flow: Flow, position: int, micro_batch: int) -> None:
        here = self.activations.inputs if flow is Flow.ACTIVATION else self.activations.gradients
        if (position, micro_batch) not in here:
            here[position, micro_batch] = self.parts.messages.take((flow, position, micro_batch))

    # Passes.

    def forward(self, step: Forward) -> None:
        layout, position, m = self.parts.layout, step.position, step.micro_batch
        self._bind(position)
        if position > 0:
            self._await(Flow.ACTIVATION, position, m)
        lane = "evaluation" if self.training is None else "compute"
        with self.parts.trace.executed(lane, step, self.parts.lanes):
            if position == layout.head:
                with torch.no_grad():
                    self.losses[m] = self._loss_sum(self.activations.inputs.pop((position, m)), m)
            else:
                self.activations.inputs[position + 1, m] = self._pass(position, m)

    def backward(self, step: Backward) -> None:
        position, m = step.position, step.micro_batch
        unit = self._bind(position)
        if position != self.parts.layout.head:
            self._await(Flow.GRADIENT, position + 1, m)
        with self.parts.trace.executed("compute", step, self.parts.lanes):
            source, output, gradient = self._graph(position, m)
            parameters = self.parts.modules.of(unit).parameters
            sources = [source, *parameters] if position > 0 else parameters
            gradients = torch.autograd.grad(output, sources, gradient)
            if position > 0:
                self.activations.gradients[position, m] = gradients[0]
            self.parts.gradients.accumulate(unit, gradients[-len(parameters) :])
            if self.probe is not None:
                self.probe.accumulate(position, gradients[-len(parameters) :])

    def _bind(self, position: int) -> int:
        unit = self.parts.layout.unit_of(position)
        self.parts.copies.bind(unit, self.parts.modules.of(unit))
        return unit

    def _pass(self, position: int, m: int) -> Tensor:
        """The output of a position, [B, T, H]. The position's input, or its graph, is kept for the backward pass."""
        key = (position, m)
        source = self._tokens(m)[:, :-1] if position == 0 else self.activations.inputs[key]
        if self.parts.layout.recompute or self.training is None or position == 0:
            with torch.no_grad():
                output = self._compute(position, source)
            if self.training is None:
                self.activations.inputs.pop(key, None)
            return output
        source = self.activations.inputs.pop(key).requires_grad_()
        with self.parts.copies.saving():
            output = self._compute(position, source)
        self.activations.graphs[key] = Graph(source, output)
        return output.detach()

    def _graph(self, position: int, m: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Input, [B, T, H] (of the embedding: tokens, [B, T]), output and the output's gradient, [B, T, H] each; at the
        head the output is this rank's part of the loss, a scalar, and its gradient None. They are computed again,
        unless they were kept."""
        if position == self.parts.layout.head:
            return self._loss(m)
        gradient = self.activations.gradients.pop((position + 1, m))
        if (graph := self.activations.graphs.pop((position, m), None)) is not None:
            return graph.input, graph.output, gradient
        if position == 0:
            source = self._tokens(m)[:, :-1]
        else:
            source = self.activations.take_input((position, m)).detach().requires_grad_()
        return source, self._compute(position, source), gradient

    def _loss(self, m: int) -> tuple[Tensor, Tensor, None]:
        source = self.activations.take_input((self.parts.layout.head, m)).detach().requires_grad_()
        loss_sum = self._loss_sum(source, m)
        self.losses[m] = loss_sum.detach()
        return source, loss_sum / self._training.tokens, None

    def _loss_sum(self, hidden: Tensor, m: int) -> Tensor:
        return self.parts.modules.loss_sum(hidden, self._tokens(m)[:, 1:], self.parts.master)

    def _tokens(self, m: int) -> Tensor:
        if m not in self.tokens:
            self.tokens[m] = self.parts.tokens.bring(self.batch.tokens(m))
        return self.tokens[m]

    def _compute(self, position: int, source: Tensor) -> Tensor:
        return self.parts.modules.embed(source) if position == 0 else self.parts.modules.block(source)


_ACTIONS: dict[type, Callable[[Run, Any], None]] = {
    Read: Run.read,
    Fetch: Run.fetch,
    Drop: Run.drop,
    Forward: Run.forward,
    Backward: Run.backward,
    Send: Run.send,
    Receive: Run.receive,
    Stash: Run.stash,
    Unstash: Run.unstash,
    Measure: Run.measure,
    Reduce: Run.reduce,
    Tie: Run.tie,
    Agree: Run.agree,
    Update: Run.update,
}
