"""Bytes of activations over a step: a walk of a rank's plan. Pure."""

from dataclasses import dataclass

from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.sizes import Sizes
from pseudoreal_trainer.plan.steps import Backward, Forward, RankPlan, Receive, Stash, Unstash


@dataclass(frozen=True)
class Peak:
    """Most bytes of activations at a time."""

    device: int
    host: int


def activation_peak(layout: Layout, sizes: Sizes, rank: int, steps: RankPlan) -> Peak:
    """Of the data rank with the largest part of a micro-batch, and one step."""
    walk = _Walk(layout, sizes, rank)
    for step in steps:
        walk.take(step)
    return Peak(walk.device_peak, walk.host_peak)


class _Walk:
    def __init__(self, layout: Layout, sizes: Sizes, rank: int) -> None:
        self._layout, self._sizes, self._rank = layout, sizes, rank
        rows = sizes.most_rows(layout.data)
        self._boundary, self._graph = sizes.boundary(rows), sizes.block_graph(rows)
        self._device = self._host = 0
        self.device_peak = self.host_peak = 0

    def take(self, step: object) -> None:
        match step:
            case Receive():
                self._hold(self._boundary)
            case Forward():
                self._forward(step)
            case Backward():
                self._backward(step)
            case Stash():
                self._hold(-self._boundary)
                self._host += self._boundary
                self.host_peak = max(self.host_peak, self._host)
            case Unstash():
                self._hold(self._boundary)
                self._host -= self._boundary

    def _hold(self, change: int, *, briefly: int = 0) -> None:
        self._device += change
        self.device_peak = max(self.device_peak, self._device + briefly)

    def _forward(self, step: Forward) -> None:
        """Its output is the next position's input; its input stays for the backward pass."""
        self._hold(0, briefly=self._boundary + self._kept(step.position))
        if self._is_here(step.position + 1):
            self._hold(self._boundary)
        self._hold(0 if self._layout.recompute else self._kept(step.position))

    def _backward(self, step: Backward) -> None:
        position = step.position
        graph = self._kept(position)
        held = 0 if self._layout.recompute or position == self._layout.head else graph
        briefly = graph - held + self._parameter_gradients(position) + (self._boundary if position > 0 else 0)
        self._hold(0, briefly=briefly)
        self._hold(-held)
        # Gone: the gradient of its output and its own input. New: the gradient of its input.
        self._hold(-self._boundary if position < self._layout.head else 0)
        self._hold(-self._boundary if position > 0 else 0)
        self._hold(self._boundary if position > 0 and self._is_here(position - 1) else 0)

    def _kept(self, position: int) -> int:
        return self._graph if 0 < position < self._layout.head else 0

    def _parameter_gradients(self, position: int) -> int:
        return self._sizes.units[self._layout.unit_of(position)].numel * self._sizes.compute_bytes

    def _is_here(self, position: int) -> bool:
        return self._layout.rank_of(position) == self._rank
