"""Runs each kind of pass once before the first message is awaited.

A kernel's first launch loads it, libraries create handles and workspaces, the allocator asks the driver for memory:
each of these may wait for all kernels of the device. A receive kernel ends only when another rank has sent, and that
rank may first need something from this rank. So the warm-up runs while no receive is pending.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pseudoreal_trainer.engine.passes import Passes, PlanRun
from pseudoreal_trainer.model.attention import Documents, Scope, find_documents
from pseudoreal_trainer.model.experts import RouterStatistics
from pseudoreal_trainer.model.modules import Modules
from pseudoreal_trainer.plan.memory.pinned_arena import MicroBatchShape
from pseudoreal_trainer.plan.records import Backward, Forward, RankPlan


class WarmUp:
    """Runs passes of a rank on zeros, once per shape of micro-batches."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._done: set[MicroBatchShape] = set()
        """Shapes of micro-batches already warmed up."""

    def run(self, run: PlanRun, plan: RankPlan) -> None:
        """Run the passes on zeros, for each new shape of the plan. Binds modules to zeros instead of their weights, and
        unbinds them afterwards."""
        passes = self._passes
        records = [record for record in plan if isinstance(record, Forward | Backward)]
        micro_batches = {record.micro_batch for record in records}
        shapes = {run.batch.shape(m) for m in micro_batches} - self._done
        if not shapes:
            return  # the rest would wait for all kernels in every step
        positions = _one_of_each_kind(passes, sorted({record.position for record in records}))
        # In an order that is the same on all context ranks: attention is collective over them.
        for shape in sorted(shapes):
            for position in positions:
                _run_on_zeros(passes, position, shape)
        self._done.update(shapes)
        passes.copies.unbind()
        if passes.streams.are_real:
            torch.accelerator.synchronize(passes.streams.device)


def _one_of_each_kind(passes: Passes, positions: Sequence[int]) -> list[int]:
    """Return positions that together call every kernel: the embedding, the head, and a block of each kind, with and
    without a sliding window."""
    head = passes.layout.head
    kinds: dict[object, int] = {}
    for position in positions:
        module, is_end = passes.modules.of(passes.layout.units_of(position)[0]), position in (0, head)
        kinds[position if is_end else (module, passes.modules.has_window(position - 1))] = position
    return list(kinds.values())


def _run_on_zeros(passes: Passes, position: int, whole: MicroBatchShape) -> None:
    """Run a position's forward and backward pass on zeros. `whole`: shape of a micro-batch with whole sequences."""
    modules, device = passes.modules, passes.streams.device
    # One group of experts stands for all groups: they have the same kernels and share a module.
    used = [modules.of(unit) for unit in passes.layout.units_of(position)[:2]]
    for module in used:
        module.bind(torch.zeros(module.numel, dtype=modules.dtype, device=device))
    trained = [parameter for module in used for parameter in module.trained]
    shape = whole[0], whole[1] // passes.layout.sequence_ranks
    read = shape[0], shape[1] * passes.loss.ranks
    tokens = torch.zeros(read, dtype=torch.int64, device=device)
    hidden = torch.zeros((*shape, modules.hidden), dtype=modules.dtype, device=device, requires_grad=True)
    if position == passes.layout.head:
        passes.loss.backward(modules.head, hidden, tokens, 1, take=lambda *_: None)
        return
    if position == 0:
        outputs, sources = [modules.embed(tokens)], list[Tensor](trained)
    else:
        statistics = modules.router_statistics(position - 1, 1, device)
        documents = None if passes.end_of_document is None else _documents(passes.end_of_document, whole, device)
        scope = passes.scope_of(whole[1], documents)
        if passes.is_in_chunks(position) and whole[0]:
            layer = passes.chunked_layer(position, whole[1], passes.chunks_of(whole[1], documents), scope)
            with torch.no_grad():
                layer.forward(hidden)
            layer.backward(hidden.detach(), torch.ones_like(hidden), trained, lambda _: None)
            return
        if passes.layout.spreads(position):
            outputs = _expert_parallel_block(modules, hidden, position - 1, statistics, scope)
        else:
            outputs = [_block(passes, hidden, position - 1, statistics, scope)]
        sources = [hidden, *trained, *([statistics.sums] if statistics else [])]
    # With tied embeddings, the embedding's unit also contains the final norm, which the embedding does not use.
    ones = [torch.ones_like(output) for output in outputs]
    torch.autograd.grad(outputs, sources, ones, allow_unused=position == 0)


def _block(
    passes: Passes, hidden: Tensor, layer: int, statistics: RouterStatistics | None, scope: Scope | None
) -> Tensor:
    """Run a block forward, as in the passes of a step: once with a graph, or once without and once recomputed."""
    if not passes.layout.recompute:
        return passes.modules.block(hidden, layer, statistics, scope)
    with torch.no_grad():
        passes.modules.block(hidden, layer, None, scope)
    return passes.modules.block(hidden, layer, statistics, scope, is_output_read=False)


def _expert_parallel_block(
    modules: Modules, hidden: Tensor, layer: int, statistics: RouterStatistics | None, scope: Scope | None
) -> list[Tensor]:
    """Run the parts of an expert-parallel pass, as if all tokens had come to the first of this rank's experts."""
    routed = modules.route(hidden, layer, statistics, scope)
    sizes = [len(routed.features), *([0] * (len(modules.experts.up.weight) - 1))]
    counts = torch.tensor(sizes, device=hidden.device)
    made = modules.experts.outputs(routed.features, counts, sizes)
    return [routed.add_expert_output(made), routed.routes.weights]


def _documents(end: int, shape: MicroBatchShape, device: torch.device) -> Documents:
    """Return documents for warming up: in each sequence a document of one token and a long document, because with
    windows each kind has its own kernels."""
    tokens = torch.full((shape[0], shape[1] + 1), end + 1)
    tokens[:, 0] = end
    return find_documents(tokens, end, tokens.to(device))
