"""Distribution of tokens over experts in a step: sums over ranks, reported statistics, and the update of the balancing
bias."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pseudoreal_trainer.engine.ranks.process_groups import ProcessGroups
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.model.experts import RouterStatistics, RoutingDecision
from pseudoreal_trainer.plan.records import SumChoices

NO_ROUTER_STATISTICS = torch.empty(0, 0, dtype=torch.float64)
"""Router statistics of a model without experts: [0 layers, 0 sums]."""


class ChoiceCounts:
    """Counts how often the tokens of a step choose each expert of a position, without balancing biases.

    Holds this rank's counts, and after `finish` the sums over the data ranks. Counts are whole numbers, so the sums do
    not depend on how a batch is cut. Main thread only.
    """

    def __init__(self) -> None:
        self._counts: dict[int, Tensor] = {}
        self._under_way: dict[int, tuple[dist.Work, int]] = {}
        """Position -> (pending all-reduce, start in nanoseconds of time.perf_counter_ns)."""

    def add(self, position: int, decision: RoutingDecision) -> None:
        """Add the choices of a micro-batch, if a loss needs them."""
        if (counts := decision.unbiased_counts) is not None:
            before = self._counts.get(position)
            # Cloned: the all-reduce works in place, and the decision keeps its own counts.
            self._counts[position] = counts.clone() if before is None else before + counts

    def begin_sum(self, record: SumChoices, groups: ProcessGroups, trace: Trace) -> None:
        """Launch the sum over the data ranks; `finish` waits for it.

        The group `router_counts` is used only here. All data ranks of a pipeline rank call this in the same order, the
        order of the plan.
        """
        if groups.router_counts is None:
            return
        counts, begin = self._counts[record.position], time.perf_counter_ns()
        work = dist.all_reduce(counts, group=groups.router_counts, async_op=True)
        assert work is not None, "this rank is part of the group"
        self._under_way[record.position] = work, begin
        trace.count_bytes("collective", 2 * (groups.layout.data - 1) * counts.nbytes // groups.layout.data)

    def finish(self, position: int, groups: ProcessGroups, trace: Trace) -> None:
        """Wait for the position's sum, if one was launched."""
        if (under_way := self._under_way.pop(position, None)) is not None:
            work, begin = under_way
            with groups.ranks.heartbeat.waiting(f"sums the choices of experts at position {position}"):
                work.wait()
            trace.add("collective", begin, SumChoices(position))

    def of(self, position: int) -> Tensor:
        """Return the counts of a position, [experts]."""
        return self._counts[position]


def change_of_bias(counts: Tensor, rate: float) -> Tensor:
    """Return the change of a block's balancing bias, [experts], float64, from the tokens of each expert in a step.

    The bias rises by `rate` for experts with fewer tokens than the mean, and falls by `rate` for experts with more
    (Wang et al., arXiv 2408.15664, algorithm 1). Then the mean of these changes is subtracted, as in TorchTitan. A
    shift of all biases does not change the choice of experts. But without the subtraction, biases would drift to values
    that bfloat16 cannot tell apart.

    `counts`: tokens of each expert, [experts]. Sums of whole numbers, so the order of ranks and micro-batches does not
    matter.
    """
    tokens = counts.double()
    # Compare the sum with n * tokens, not the mean with tokens: both are exact whole numbers, while the mean would be
    # rounded.
    signs = (tokens.sum() - len(tokens) * tokens).sign()
    return rate * (signs - signs.mean())


def choices_of(sums: Sequence[float], layers: int) -> list[list[float]]:
    """Return the number of tokens that chose each expert, [layers with experts][experts]. `sums`: as in
    `ExpertLoad.of`."""
    return [[*row[: -RouterStatistics.OTHERS]] for row in _rows(sums, layers)]


def _rows(sums: Sequence[float], layers: int) -> list[Sequence[float]]:
    width = len(sums) // max(layers, 1)
    return [sums[begin : begin + width] for begin in range(0, len(sums), max(width, 1))]


@dataclass(frozen=True)
class ExpertLoad:
    """Distribution of a step's tokens over the experts of all layers."""

    largest: float
    """Tokens of the busiest expert as a multiple of the mean over its layer's experts; the largest value of all
    layers."""
    mean: float
    """Tokens of the busiest expert of a layer as a multiple of the mean over the layer's experts, averaged over the
    layers."""
    idle: float
    """Share of all experts that no token chose."""
    dropped: float
    """Share of all choices that were refused because the chosen expert was full."""
    entropy: float
    """Entropy of the router probabilities in nats, averaged over tokens, prototypes and layers."""
    auxiliary_loss_sum: float
    """Auxiliary losses of all layers with their factor, summed over the tokens of the batch, in nats."""

    @classmethod
    def of(cls, sums: Sequence[float], layers: int) -> "ExpertLoad | None":
        """Return the load; None if no layer has experts. `sums`: router statistics of the step in the order of
        `RouterStatistics.sums`, summed over all ranks, for one layer with experts after the other."""
        if not layers:
            return None
        rows = _rows(sums, layers)
        tokens = choices_of(sums, layers)
        refused, entropies, auxiliary_losses = zip(*(row[-RouterStatistics.OTHERS :] for row in rows), strict=True)
        choices = sum(map(sum, tokens))
        violations = [max(row) * len(row) / sum(row) for row in tokens]
        return cls(
            largest=max(violations),
            mean=sum(violations) / layers,
            idle=sum(count == 0 for row in tokens for count in row) / sum(map(len, tokens)),
            dropped=sum(refused) / choices,
            entropy=sum(entropies) / choices,
            auxiliary_loss_sum=sum(auxiliary_losses),
        )
