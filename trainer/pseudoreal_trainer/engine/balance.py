"""How tokens spread over experts in a step: what is summed over it, what is reported, and how the balancing bias
follows."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pseudoreal_trainer.engine.ranks.mesh import Mesh
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.model.experts import Choice, Tally
from pseudoreal_trainer.plan.records import SumChoices

NO_LOADS = torch.empty(0, 0, dtype=torch.float64)
"""[layers with experts, sums]: of a model without experts."""


class StepChoices:
    """How often the tokens of a step choose each expert of a position, without balancing biases: of this rank's first,
    then of all ranks. These are whole numbers, so it does not matter how a batch is cut. Only the main thread is
    here."""

    def __init__(self) -> None:
        self._counts: dict[int, Tensor] = {}
        self._under_way: dict[int, tuple[dist.Work, int]] = {}
        """Position -> its sum over the ranks, and when that began."""

    def add(self, position: int, choice: Choice) -> None:
        """Adds the choices of a micro-batch, where a loss asks for them."""
        if (counts := choice.unbiased_counts) is not None:
            before = self._counts.get(position)
            # A sum over ranks takes the place of what it sums, and the choice keeps its own.
            self._counts[position] = counts.clone() if before is None else before + counts

    def begin_sum(self, record: SumChoices, mesh: Mesh, trace: Trace) -> None:
        """Starts the sum over the ranks; `finish` waits for it."""
        if mesh.choosing is None:
            return
        counts, begin = self._counts[record.position], time.perf_counter_ns()
        work = dist.all_reduce(counts, group=mesh.choosing, async_op=True)
        assert work is not None, "this rank is part of the group"
        self._under_way[record.position] = work, begin
        trace.move("collective", 2 * (mesh.layout.data - 1) * counts.nbytes // mesh.layout.data)

    def finish(self, position: int, mesh: Mesh, trace: Trace) -> None:
        """Waits until the position's sum is here, where one was begun."""
        if (under_way := self._under_way.pop(position, None)) is not None:
            work, begin = under_way
            with mesh.ranks.heartbeat.waiting(f"sums the choices of experts at position {position}"):
                work.wait()
            trace.add("collective", begin, SumChoices(position))

    def of(self, position: int) -> Tensor:
        """[experts]"""
        return self._counts[position]


def change_of_bias(counts: Tensor, rate: float) -> Tensor:
    """The change of the balancing bias of all experts of a block, [experts], float64, by the tokens that each one got
    in a step: `rate` up for those with fewer than the mean, down for those with more (Wang et al., arXiv 2408.15664,
    algorithm 1), less the mean of that, as TorchTitan has it. A shift of all biases chooses no other expert, but
    without this they would drift to where bfloat16 cannot tell them apart.

    counts [experts]: sums of whole numbers, which do not depend on the order in which ranks and micro-batches were
    added up.
    """
    tokens = counts.double()
    # Whole numbers on both sides: the mean itself would be rounded.
    signs = (tokens.sum() - len(tokens) * tokens).sign()
    return rate * (signs - signs.mean())


def choices_of(sums: Sequence[float], layers: int) -> list[list[float]]:
    """How many tokens chose each expert, layer after layer with experts; `sums` as `ExpertLoad.of` has them."""
    return [[*row[: -Tally.OTHERS]] for row in _rows(sums, layers)]


def _rows(sums: Sequence[float], layers: int) -> list[Sequence[float]]:
    width = len(sums) // max(layers, 1)
    return [sums[begin : begin + width] for begin in range(0, len(sums), max(width, 1))]


@dataclass(frozen=True)
class ExpertLoad:
    """How a step's tokens spread over the experts of all layers."""

    largest: float
    """Tokens of the expert with the most as a multiple of the mean over its layer's experts, in the layer where that is
    largest."""
    mean: float
    """The same in the mean over the layers."""
    idle: float
    """Share of all experts that no token chose."""
    dropped: float
    """Share of the choices that experts refused as they were full."""
    entropy: float
    """Entropy of the probabilities that routers give to experts, in nats, in the mean over tokens, prototypes and
    layers."""
    auxiliary_loss_sum: float
    """The auxiliary losses of all layers with their factor, summed over the tokens of the batch, in nats."""

    @classmethod
    def of(cls, sums: Sequence[float], layers: int) -> "ExpertLoad | None":
        """`sums`: of each layer with experts those of its tallies, as `Tally.sums` has them; layer after layer. None
        where no layer has any."""
        if not layers:
            return None
        rows = _rows(sums, layers)
        tokens = choices_of(sums, layers)
        refused, entropies, auxiliary_losses = zip(*(row[-Tally.OTHERS :] for row in rows), strict=True)
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
