"""The passes of layers whose experts are spread over ranks: their parts, between which rows travel.

A rank computes attention, router and shared experts for its own tokens. Rows of these go to the ranks of their experts,
and what the experts made of them comes back. The weights of the sum are applied where the tokens are. A backward pass
needs the products of gradients with what the experts made: these are formed where that is, so that it need not travel
again. Only the main thread is here.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pseudoreal_trainer.engine.passes import Passes, PlanRun
from pseudoreal_trainer.engine.ranks.exchanges import Exchanges, RowCounts
from pseudoreal_trainer.engine.stash import Key
from pseudoreal_trainer.model.block import Routed
from pseudoreal_trainer.model.experts import Choice, Experts, Tally
from pseudoreal_trainer.model.grouped import by_expert
from pseudoreal_trainer.model.top_k import TopKExperts
from pseudoreal_trainer.plan.records import (
    Backward,
    Count,
    Exchange,
    ExpertBackward,
    ExpertForward,
    Flow,
    Forward,
    Leg,
    Recompute,
    Route,
)


@dataclass(frozen=True)
class _Graph:
    """A pass up to the experts, with what its backward pass needs; not what it made."""

    input: Tensor
    """[B, T, H]"""
    outputs: tuple[GradientEdge, ...]
    """The hidden features, the rows, the weights of rows, and where there are shared experts their output."""
    weights: Tensor
    """Weights of rows, [rows], without a gradient."""
    tally: Tally | None


@dataclass(frozen=True)
class _Mixed:
    """A pass of this rank's experts with its graph."""

    places: Tensor
    """Where the rows were as they came, [rows]."""
    rows: Tensor
    """In the order of the experts, [rows, H]."""
    made: Tensor
    """[rows, H]"""


@dataclass
class _State:
    """What the parts of passes have left for each other in a run of a plan."""

    counts: dict[Key, RowCounts] = field(default_factory=dict)
    routed: dict[Key, Routed] = field(default_factory=dict)
    """Passes up to the experts, until the sum; those whose graphs are kept have one."""
    begun: dict[Key, tuple[Tensor, Tally | None]] = field(default_factory=dict)
    """Inputs of passes whose graphs are kept, [B, T, H], and their tallies, until the rows are known."""
    choices: dict[Key, Choice] = field(default_factory=dict)
    """In training, until the backward pass has used them."""
    leaving: dict[Exchange, Tensor] = field(default_factory=dict)
    """What an exchange will send, [rows, width]."""
    mixed: dict[Key, _Mixed] = field(default_factory=dict)
    """Passes of experts whose graphs are kept."""
    graphs: dict[Key, _Graph] = field(default_factory=dict)


class SpreadPasses:
    """The parts of a rank's passes; `begin` comes before those of each run of a plan."""

    def __init__(self, passes: Passes, exchanges: Exchanges) -> None:
        self._passes, self._exchanges, self._modules = passes, exchanges, passes.modules
        self._layout = passes.layout
        self._state = _State()

    def begin(self) -> None:
        self._state = _State()

    def execute(
        self, run: PlanRun, record: Route | Count | Exchange | ExpertForward | Recompute | ExpertBackward
    ) -> None:
        match record:
            case Route():
                self._route(run, record)
            case Count():
                self._count(record)
            case Exchange():
                self._exchange(run, record)
            case ExpertForward():
                self._expert_forward(run, record)
            case Recompute():
                self._recompute(run, record)
            case ExpertBackward():
                self._expert_backward(run, record)

    # Forward.

    def _route(self, run: PlanRun, record: Route) -> None:
        key, keeps_graph = (record.position, record.micro_batch), self._keeps_graph(run)
        self._bind_block(record.position)
        self._passes.await_message(run, Flow.ACTIVATION, *key)
        is_needed_again = run.training is not None and not keeps_graph
        source = run.inputs[key] if is_needed_again else run.inputs.pop(key)
        with self._passes.computing(record):
            if keeps_graph:
                tally = self._passes.tally(run, record.position, source)
                self._state.begun[key] = (source.requires_grad_(), tally)
                with self._passes.copies.saving():
                    self._state.routed[key] = self._routed(run, key, source, tally)
            else:
                with torch.no_grad():
                    self._state.routed[key] = self._routed(run, key, source)
        run.choices_of_step.add(record.position, self._state.routed[key].routes.choice)

    def _count(self, record: Count) -> None:
        keys = [(record.position, m) for m in range(record.first, record.first + record.micro_batches)]
        counts = [self._state.routed[key].routes.choice.counts.flatten() for key in keys]
        self._state.counts.update(zip(keys, self._exchanges.count(record, torch.stack(counts)), strict=True))

    def _exchange(self, run: PlanRun, record: Exchange) -> None:
        key = (record.position, record.micro_batch)
        if record.leg is Leg.DISPATCH:
            rows = self._dispatched(key)
        elif record.leg is Leg.COMBINE_GRADIENT:
            self._passes.await_message(run, Flow.GRADIENT, key[0] + 1, key[1])
            rows = self._gradients_of_rows(run, key)
        else:
            rows = self._state.leaving.pop(record)
        self._exchanges.begin(record, rows, self._state.counts[key])

    def _expert_forward(self, run: PlanRun, record: ExpertForward) -> None:
        key = (record.position, record.micro_batch)
        self._bind_experts(record.position)
        rows = self._exchanges.take(Exchange(Leg.DISPATCH, *key))
        with self._passes.computing(record):
            if self._keeps_graph(run):
                with self._passes.copies.saving():
                    mixed = self._state.mixed[key] = self._mixed(key, rows)
            else:
                with torch.no_grad():
                    mixed = self._mixed(key, rows)
            # In the order in which the rows came.
            made = torch.empty_like(rows).index_copy_(0, mixed.places, mixed.made.detach())
        self._state.leaving[Exchange(Leg.COMBINE, *key)] = made

    @torch.no_grad()
    def forward(self, run: PlanRun, record: Forward) -> None:
        position, m = key = (record.position, record.micro_batch)
        made = self._exchanges.take(Exchange(Leg.COMBINE, *key))
        with self._passes.computing(record):
            routed, counts = self._state.routed.pop(key), self._state.counts[key].of_experts
            weights = self._experts.weights_of_rows(routed.routes, counts)
            mixed = self._experts.combined(made, weights, routed.routes.choice, counts)
            run.inputs[position + 1, m] = routed.summed(mixed)
        if run.training is not None:
            self._state.choices[key] = routed.routes.choice

    # Backward.

    def _recompute(self, run: PlanRun, record: Recompute) -> None:
        key = (record.position, record.micro_batch)
        self._bind_block(record.position)
        with self._passes.computing(record):
            source = self._passes.take_input(run, *key)
            tally = self._passes.tally(run, record.position, source)
            routed = self._routed(run, key, source, tally, self._state.choices[key])
            self._state.graphs[key], rows = self._graph(key, routed, source, tally)
        self._state.leaving[Exchange(Leg.DISPATCH_AGAIN, *key)] = rows

    def _expert_backward(self, run: PlanRun, record: ExpertBackward) -> None:
        key = (record.position, record.micro_batch)
        unit = self._bind_experts(record.position)
        if (mixed := self._state.mixed.pop(key, None)) is None:
            rows = self._exchanges.take(Exchange(Leg.DISPATCH_AGAIN, *key))
            with self._passes.computing(record):
                mixed = self._mixed(key, rows)
        came = self._exchanges.take(Exchange(Leg.COMBINE_GRADIENT, *key))
        with self._passes.computing(record):
            back, gradients = self._through_experts(unit, mixed, came)
            self._passes.add_gradients(run, record.position, unit, gradients)
        self._state.leaving[Exchange(Leg.DISPATCH_GRADIENT, *key)] = back

    def backward(self, run: PlanRun, record: Backward) -> None:
        position, m = key = (record.position, record.micro_batch)
        unit = self._bind_block(position)
        came = self._exchanges.take(Exchange(Leg.DISPATCH_GRADIENT, *key))
        with self._passes.computing(record):
            graph, gradient = self._state.graphs.pop(key), run.gradients.pop((position + 1, m))
            width, tally = gradient.shape[-1], graph.tally
            # The sum hands its gradient on as it is: to the hidden features, and to the output of shared experts.
            given = [gradient, came[:, :width], came[:, width].to(graph.weights.dtype), gradient]
            trained = self._modules.of(unit).trained
            sources = [graph.input, *trained, *([tally.sums] if tally else [])]
            first, *gradients = torch.autograd.grad(graph.outputs, sources, given[: len(graph.outputs)])
            run.gradients[position, m] = first
            self._passes.add_gradients(run, position, unit, gradients[: len(trained)], *gradients[len(trained) :])
        del self._state.choices[key], self._state.counts[key]

    # The parts of these parts.

    @property
    def _experts(self) -> Experts | TopKExperts:
        return self._modules.experts

    def _keeps_graph(self, run: PlanRun) -> bool:
        return run.training is not None and not self._layout.recompute

    def _bind_block(self, position: int) -> int:
        return self._bind(self._layout.units_of(position)[0])

    def _bind_experts(self, position: int) -> int:
        return self._bind(self._layout.units_of(position)[1])

    def _bind(self, unit: int) -> int:
        self._passes.copies.bind(unit, self._modules.of(unit))
        return unit

    def _routed(
        self, run: PlanRun, key: Key, source: Tensor, tally: Tally | None = None, choice: Choice | None = None
    ) -> Routed:
        position, m = key
        return self._modules.routed(source, position - 1, tally, self._passes.documents(run, m), choice)

    def _dispatched(self, key: Key) -> Tensor:
        """The rows of a micro-batch's tokens, [rows, H]."""
        routed = self._state.routed[key]
        if key in self._state.begun:
            with self._passes.copies.saving():
                self._state.graphs[key], rows = self._graph(key, routed, *self._state.begun.pop(key))
            return rows
        with torch.no_grad():
            return self._experts.rows(routed.features, routed.routes.choice, self._state.counts[key].of_experts)

    def _graph(self, key: Key, routed: Routed, source: Tensor, tally: Tally | None) -> tuple[_Graph, Tensor]:
        """The graph of a pass up to the experts, and the rows that go there, [rows, H]."""
        routes, counts = routed.routes, self._state.counts[key].of_experts
        rows = self._experts.rows(routed.features, routes.choice, counts)
        weights = self._experts.weights_of_rows(routes, counts)
        made = [routed.hidden, rows, weights, *([] if routed.shared is None else [routed.shared])]
        graph = _Graph(source, tuple(map(get_gradient_edge, made)), weights.detach(), tally)
        return graph, rows.detach()

    def _gradients_of_rows(self, run: PlanRun, key: Key) -> Tensor:
        """The gradient of what came back for each row, before it was weighted, and the row's weight, [rows, H + 1]."""
        gradient = run.gradients[key[0] + 1, key[1]].flatten(0, 1)  # [N, H]
        rows = self._experts.rows(gradient, self._state.choices[key], self._state.counts[key].of_experts)
        return torch.cat([rows, self._state.graphs[key].weights.to(rows.dtype)[:, None]], dim=1)

    def _mixed(self, key: Key, came: Tensor) -> _Mixed:
        """What this rank's experts make of rows, [rows, H], in the order in which they came."""
        counts = self._state.counts[key]
        places = by_expert(counts.table, len(came))
        rows = came.index_select(0, places)
        if torch.is_grad_enabled():
            rows.requires_grad_()
        made = self._experts.outputs(rows, counts.table.sum(dim=0), counts.of_own)
        return _Mixed(places, rows, made)

    def _through_experts(self, unit: int, mixed: _Mixed, came: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Goes back through this rank's experts: what each row's token gets, the gradient of the row and that of its
        weight, [rows, H + 1] in the order in which they came; and the gradients of the experts' parameters."""
        came = came.index_select(0, mixed.places)
        gradient, weights = came[:, :-1], came[:, -1:]
        trained = self._modules.of(unit).trained
        of_rows, *gradients = torch.autograd.grad(mixed.made, [mixed.rows, *trained], gradient * weights)
        of_weights = (gradient * mixed.made.detach()).sum(dim=1, keepdim=True)
        back = torch.empty_like(came).index_copy_(0, mixed.places, torch.cat([of_rows, of_weights], dim=1))
        return back, gradients
