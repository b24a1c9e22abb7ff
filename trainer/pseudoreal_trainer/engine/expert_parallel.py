"""Expert-parallel passes: a layer's pass is split into parts, and rows travel by all-to-all between the parts. Main
thread only.

A rank computes attention, router and shared experts for its own tokens. A row is a token's copy for one of its experts.
Dispatch sends rows to the ranks of their experts, combine sends the experts' outputs back, and the token's rank applies
the routing weights. The gradient of a routing weight is the dot product of a gradient and an expert's output. The
expert's rank computes this product, so that the output need not travel again.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pseudoreal_trainer.engine.activation_offload import Key
from pseudoreal_trainer.engine.passes import Passes, PlanRun
from pseudoreal_trainer.engine.ranks.all_to_all import ExpertExchanges, RowCounts
from pseudoreal_trainer.model.block import RoutedTokens
from pseudoreal_trainer.model.experts import Experts, RouterStatistics, RoutingDecision
from pseudoreal_trainer.model.grouped import rows_by_expert
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
    """Autograd graph of a pass up to the experts. Holds edges in place of the outputs, so that the outputs' memory can
    be freed."""

    input: Tensor
    """[B, T, H]"""
    outputs: tuple[GradientEdge, ...]
    """Edges of the residual stream, the rows, the weights of the rows, and the output of shared experts if there are
    any."""
    weights: Tensor
    """Routing weights of the rows, [rows], detached."""
    statistics: RouterStatistics | None


@dataclass(frozen=True)
class _GroupPass:
    """Forward pass of a group of this rank's experts."""

    arrivals: Tensor
    """Index of each row in arrival order, [rows]."""
    rows: Tensor
    """Inputs in the order of the experts, [rows, H]."""
    outputs: Tensor
    """Outputs of the experts, [rows, H]."""


@dataclass
class _ArrivedRows:
    """Rows of a micro-batch that arrived at this rank's experts in a forward or backward pass, until all groups of
    experts have computed."""

    arrivals: Tensor
    """Arrival indices of the rows of the first expert, then of the second, ...: [rows]."""
    rows: Tensor | None
    """Rows in arrival order, [rows, H]; None in a backward pass if graphs are kept."""
    gradients: Tensor | None = None
    """[rows, H + 1], in arrival order: the gradient of the output of the row's token, and in the last column the row's
    weight. None in the forward pass, and in a backward pass until the exchange was awaited."""
    results: Tensor | None = None
    """Results to send back, one per row, in arrival order; None until a group with rows has computed."""

    def store(self, arrivals: Tensor, results: Tensor) -> None:
        """Store the results of a group at the arrival indices of its rows."""
        if self.results is None:
            self.results = results.new_empty(len(self.arrivals), results.shape[1])
        self.results.index_copy_(0, arrivals, results)


@dataclass
class _State:
    """Tensors passed between the parts of passes during one run of a plan."""

    counts: dict[Key, RowCounts] = field(default_factory=dict)
    routed: dict[Key, RoutedTokens] = field(default_factory=dict)
    """(position, micro-batch) -> result of the pass up to the experts, until `Forward` adds the experts' outputs. With
    a graph if graphs are kept."""
    inputs: dict[Key, tuple[Tensor, RouterStatistics | None]] = field(default_factory=dict)
    """(position, micro-batch) -> input, [B, T, H], and router statistics of a pass that keeps its graph, until the row
    counts are known."""
    routing_decisions: dict[Key, RoutingDecision] = field(default_factory=dict)
    """(position, micro-batch) -> routing decision of a training pass, until the backward pass has used it."""
    to_send: dict[Exchange, Tensor] = field(default_factory=dict)
    """Exchange -> rows to send, [rows, width]."""
    arrived_rows: dict[Key, _ArrivedRows] = field(default_factory=dict)
    group_passes: dict[tuple[Key, int], _GroupPass] = field(default_factory=dict)
    """((position, micro-batch), group) -> pass of the group, if graphs are kept."""
    graphs: dict[Key, _Graph] = field(default_factory=dict)


class ExpertParallelPasses:
    """Executes the parts of expert-parallel passes on one rank. Call `begin` before each run of a plan."""

    def __init__(self, passes: Passes, exchanges: ExpertExchanges) -> None:
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
                statistics = self._passes.new_statistics(run, record.position, source)
                self._state.inputs[key] = (source.requires_grad_(), statistics)
                with self._passes.copies.saving():
                    self._state.routed[key] = self._route_tokens(run, key, source, statistics)
            else:
                with torch.no_grad():
                    self._state.routed[key] = self._route_tokens(run, key, source)
        run.choice_counts.add(record.position, self._state.routed[key].routes.decision)

    def _count(self, record: Count) -> None:
        keys = [(record.position, m) for m in range(record.first, record.first + record.micro_batches)]
        chosen = [self._state.routed[key].routes.decision.counts.flatten() for key in keys]
        counts = self._exchanges.exchange_counts(record, torch.stack(chosen))
        self._state.counts.update(zip(keys, counts, strict=True))
        if self._layout.asks_for_groups(record.position):
            _, *groups = self._layout.units_of(record.position)
            have_rows = self._exchanges.groups_with_rows(record, counts)
            self._passes.copies.record_routed_groups(record.position, dict(zip(groups, have_rows, strict=True)))

    def _exchange(self, run: PlanRun, record: Exchange) -> None:
        key = (record.position, record.micro_batch)
        if record.leg is Leg.DISPATCH:
            rows = self._rows_to_dispatch(key)
        elif record.leg is Leg.COMBINE_GRADIENT:
            self._passes.await_message(run, Flow.GRADIENT, key[0] + 1, key[1])
            rows = self._gradients_of_rows(run, key)
        else:
            rows = self._state.to_send.pop(record)
        self._exchanges.start(record, rows, self._state.counts[key])

    def _expert_forward(self, run: PlanRun, record: ExpertForward) -> None:
        key = (record.position, record.micro_batch)
        if record.group == 0:
            rows = self._exchanges.take(Exchange(Leg.DISPATCH, *key))
            self._state.arrived_rows[key] = _ArrivedRows(self._arrival_order(key), rows)
        arrived = self._state.arrived_rows[key]
        if self._has_rows(record):
            self._bind(self._experts_unit(record))
            with self._passes.computing(record):
                if self._keeps_graph(run):
                    with self._passes.copies.saving():
                        group_pass = self._state.group_passes[key, record.group] = self._group_pass(record, arrived)
                else:
                    with torch.no_grad():
                        group_pass = self._group_pass(record, arrived)
                arrived.store(group_pass.arrivals, group_pass.outputs.detach())
        if self._is_last(record):
            self._queue_results(Exchange(Leg.COMBINE, *key), arrived.rows)

    @torch.no_grad()
    def forward(self, run: PlanRun, record: Forward) -> None:
        position, m = key = (record.position, record.micro_batch)
        received = self._exchanges.take(Exchange(Leg.COMBINE, *key))
        with self._passes.computing(record):
            routed, counts = self._state.routed.pop(key), self._state.counts[key].of_experts
            weights = self._experts.row_weights(routed.routes, counts)
            combined = self._experts.combine(received, weights, routed.routes.decision, counts)
            run.inputs[position + 1, m] = routed.add_expert_output(combined)
        if run.training is not None:
            self._state.routing_decisions[key] = routed.routes.decision

    # Backward.

    def _recompute(self, run: PlanRun, record: Recompute) -> None:
        key = (record.position, record.micro_batch)
        self._bind_block(record.position)
        with self._passes.computing(record):
            source = self._passes.take_input(run, *key)
            statistics = self._passes.new_statistics(run, record.position, source)
            routed = self._route_tokens(run, key, source, statistics, self._state.routing_decisions[key])
            self._state.graphs[key], rows = self._graph_and_rows(key, routed, source, statistics)
        self._state.to_send[Exchange(Leg.DISPATCH_AGAIN, *key)] = rows

    def _expert_backward(self, run: PlanRun, record: ExpertBackward) -> None:
        key, unit = (record.position, record.micro_batch), self._experts_unit(record)
        if record.group == 0:
            again = Exchange(Leg.DISPATCH_AGAIN, *key)
            rows = None if self._keeps_graph(run) else self._exchanges.take(again)
            self._state.arrived_rows[key] = _ArrivedRows(self._arrival_order(key), rows)
        arrived, has_rows = self._state.arrived_rows[key], self._has_rows(record)
        group_pass = self._group_pass_with_graph(record, arrived) if has_rows else None
        if arrived.gradients is None:
            arrived.gradients = self._exchanges.take(Exchange(Leg.COMBINE_GRADIENT, *key))
        with self._passes.computing(record):
            gradients = [] if group_pass is None else self._backward_of_experts(unit, group_pass, arrived)
            # If no rows arrived, no gradient is added; the accumulator sets the gradients of these parameters to zero.
            self._passes.add_gradients(run, record.position, unit, gradients)
        if self._is_last(record):
            self._queue_results(Exchange(Leg.DISPATCH_GRADIENT, *key), arrived.gradients)

    def backward(self, run: PlanRun, record: Backward) -> None:
        position, m = key = (record.position, record.micro_batch)
        unit = self._bind_block(position)
        received = self._exchanges.take(Exchange(Leg.DISPATCH_GRADIENT, *key))
        with self._passes.computing(record):
            graph, gradient = self._state.graphs.pop(key), run.gradients.pop((position + 1, m))
            width, statistics = gradient.shape[-1], graph.statistics
            # The final sum passes its gradient unchanged to the residual stream and to the output of shared experts.
            gradients_of_outputs = [gradient, received[:, :width], received[:, width].to(graph.weights.dtype), gradient]
            trained = self._modules.of(unit).trained
            sources = [graph.input, *trained, *([statistics.sums] if statistics else [])]
            first, *gradients = torch.autograd.grad(graph.outputs, sources, gradients_of_outputs[: len(graph.outputs)])
            run.gradients[position, m] = first
            self._passes.add_gradients(run, position, unit, gradients[: len(trained)], *gradients[len(trained) :])
        del self._state.routing_decisions[key], self._state.counts[key]

    # Helpers of these parts.

    @property
    def _experts(self) -> Experts | TopKExperts:
        return self._modules.experts

    def _keeps_graph(self, run: PlanRun) -> bool:
        return run.training is not None and not self._layout.recompute

    def _bind_block(self, position: int) -> int:
        return self._bind(self._layout.units_of(position)[0])

    def _experts_unit(self, record: ExpertForward | ExpertBackward) -> int:
        return self._layout.units_of(record.position)[1 + record.group]

    def _is_last(self, record: ExpertForward | ExpertBackward) -> bool:
        return record.group == self._layout.expert_groups - 1

    def _slice_of_group(self, record: ExpertForward | ExpertBackward) -> slice:
        """Return the slice of this rank's experts that belongs to the group."""
        of_own = self._state.counts[record.position, record.micro_batch].of_own
        of_each = len(of_own) // self._layout.expert_groups
        return slice(record.group * of_each, (record.group + 1) * of_each)

    def _has_rows(self, record: ExpertForward | ExpertBackward) -> bool:
        """Return whether rows arrived for the group. If not, the group's weights may not have been fetched."""
        return any(self._state.counts[record.position, record.micro_batch].of_own[self._slice_of_group(record)])

    def _queue_results(self, exchange: Exchange, received: Tensor | None) -> None:
        """Queue the results of all groups for the exchange that sends them back. If no rows arrived, queue `received`,
        an empty tensor, [0, width]."""
        results = self._state.arrived_rows.pop((exchange.position, exchange.micro_batch)).results
        if results is None:
            assert received is not None, "a rank without rows has received an empty tensor"
            results = received
        self._state.to_send[exchange] = results

    def _bind(self, unit: int) -> int:
        self._passes.copies.bind(unit, self._modules.of(unit))
        return unit

    def _route_tokens(
        self,
        run: PlanRun,
        key: Key,
        source: Tensor,
        statistics: RouterStatistics | None = None,
        decision: RoutingDecision | None = None,
    ) -> RoutedTokens:
        position, m = key
        return self._modules.route(source, position - 1, statistics, self._passes.scope(run, m), decision)

    def _rows_to_dispatch(self, key: Key) -> Tensor:
        """Return the rows of a micro-batch's tokens, [rows, H]."""
        routed = self._state.routed[key]
        if key in self._state.inputs:
            with self._passes.copies.saving():
                self._state.graphs[key], rows = self._graph_and_rows(key, routed, *self._state.inputs.pop(key))
            return rows
        with torch.no_grad():
            return self._experts.rows(routed.features, routed.routes.decision, self._state.counts[key].of_experts)

    def _graph_and_rows(
        self, key: Key, routed: RoutedTokens, source: Tensor, statistics: RouterStatistics | None
    ) -> tuple[_Graph, Tensor]:
        """Return the graph of a pass up to the experts, and the rows to dispatch, [rows, H]."""
        routes, counts = routed.routes, self._state.counts[key].of_experts
        rows = self._experts.rows(routed.features, routes.decision, counts)
        weights = self._experts.row_weights(routes, counts)
        outputs = [routed.hidden, rows, weights, *([] if routed.shared is None else [routed.shared])]
        graph = _Graph(source, tuple(map(get_gradient_edge, outputs)), weights.detach(), statistics)
        return graph, rows.detach()

    def _gradients_of_rows(self, run: PlanRun, key: Key) -> Tensor:
        """Return the unweighted gradient of each row's output and, in the last column, the row's weight, [rows, H +
        1]."""
        gradient = run.gradients[key[0] + 1, key[1]].flatten(0, 1)  # [N, H]
        rows = self._experts.rows(gradient, self._state.routing_decisions[key], self._state.counts[key].of_experts)
        return torch.cat([rows, self._state.graphs[key].weights.to(rows.dtype)[:, None]], dim=1)

    def _arrival_order(self, key: Key) -> Tensor:
        counts = self._state.counts[key]
        return rows_by_expert(counts.table, sum(counts.arriving))

    def _group_pass(self, record: ExpertForward | ExpertBackward, arrived: _ArrivedRows) -> _GroupPass:
        """Compute the outputs of one group of this rank's experts for the rows that arrived for the group."""
        assert arrived.rows is not None, "rows arrive before a group computes"
        counts, own = self._state.counts[record.position, record.micro_batch], self._slice_of_group(record)
        sizes, begin = counts.of_own[own], sum(counts.of_own[: own.start])
        arrivals = arrived.arrivals[begin : begin + sum(sizes)]
        rows = arrived.rows.index_select(0, arrivals)
        if torch.is_grad_enabled():
            rows.requires_grad_()
        outputs = self._experts.outputs(rows, counts.table[:, own].sum(dim=0), sizes)
        return _GroupPass(arrivals, rows, outputs)

    def _group_pass_with_graph(self, record: ExpertBackward, arrived: _ArrivedRows) -> _GroupPass:
        """Return the forward pass of a group with its graph, kept or recomputed."""
        self._bind(self._experts_unit(record))
        if arrived.rows is None:
            return self._state.group_passes.pop(((record.position, record.micro_batch), record.group))
        with self._passes.computing(record):
            return self._group_pass(record, arrived)

    def _backward_of_experts(self, unit: int, group_pass: _GroupPass, arrived: _ArrivedRows) -> list[Tensor]:
        """Backpropagate through a group of this rank's experts and return the gradients of their parameters. Store the
        gradients of each row and of the row's weight, for the exchange that sends them back."""
        assert arrived.gradients is not None, "the gradients are taken before the first group's backward pass"
        received = arrived.gradients.index_select(0, group_pass.arrivals)
        gradient, weights = received[:, :-1], received[:, -1:]
        trained = self._modules.of(unit).trained
        of_rows, *gradients = torch.autograd.grad(group_pass.outputs, [group_pass.rows, *trained], gradient * weights)
        of_weights = (gradient * group_pass.outputs.detach()).sum(dim=1, keepdim=True)
        arrived.store(group_pass.arrivals, torch.cat([of_rows, of_weights], dim=1))
        return gradients
