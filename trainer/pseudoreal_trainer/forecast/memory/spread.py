"""Bytes of the parts of passes through spread experts. Pure.

Rows that leave for other ranks are in memory as long as those that come; a rank that has all experts exchanges them
with itself, and has them once. A group of experts has its part of a micro-batch's rows at a time; what came for all
groups, and what goes back, is there from the first group to the last.

How many rows come to a rank's experts depends on the data. Here all experts get as many, and none refuses any: a rank
whose experts get twice as many needs twice the bytes of what is called rows here.
"""

from dataclasses import dataclass
from functools import cached_property

from pseudoreal_trainer.forecast.memory.graphs import Graphs
from pseudoreal_trainer.plan.records import (
    Backward,
    Exchange,
    ExpertBackward,
    ExpertForward,
    Forward,
    Leg,
    Recompute,
    Route,
)
from pseudoreal_trainer.plan.spread import Part

_INDEX_BYTES = 8


@dataclass(frozen=True)
class Change:
    """How a record changes the bytes of the device."""

    held: int = 0
    """Bytes that it takes, and that stay behind it but for `freed`."""
    briefly: int = 0
    """Bytes that it needs besides while it runs."""
    freed: int = 0
    """Bytes that are free behind it."""


@dataclass(frozen=True)
class SpreadBytes:
    """The parts of passes of a layer over some tokens."""

    graphs: Graphs
    keeps_graph: bool
    ranks: int
    """Number of ranks over which the experts are spread."""
    groups: int
    """Number of groups of a rank's experts."""

    def change(self, record: Part) -> Change:
        match record:
            case Route():
                return Change(held=self._routed + self.graphs.choice + (self._dense if self.keeps_graph else 0))
            case Exchange(leg):
                return self._exchanged(leg)
            case ExpertForward(group=group):
                return self._forward_of(group)
            case Forward():
                # The rows that came back, weighted, and in the order of the tokens. The choice stays.
                return Change(self._boundary, briefly=2 * self._rows, freed=self._copies * self._rows + self._routed)
            case Recompute():
                return Change(self._dense + self._rows, briefly=self._rows)
            case ExpertBackward(group=group):
                return self._backward_of(group)
            case Backward():
                return Change(
                    briefly=max(0, self._during_dense - self._dense),
                    # The input and the gradient of the output; the gradient of the input takes the place of one.
                    freed=self._copies * self._weighted_rows + self._dense + self.graphs.choice + self._boundary,
                )
        return Change()

    @property
    def _copies(self) -> int:
        """How often rows are in memory that were exchanged: as they left, and as they came."""
        return 2 if self.ranks > 1 else 1

    def _exchanged(self, leg: Leg) -> Change:
        """What arrives; and what leaves, where it is made for that."""
        size = self._weighted_rows if leg in (Leg.COMBINE_GRADIENT, Leg.DISPATCH_GRADIENT) else self._rows
        makes = leg in (Leg.DISPATCH, Leg.COMBINE_GRADIENT)
        return Change(held=(self._copies - 1 + makes) * size, briefly=self._rows if makes else 0)

    def _forward_of(self, group: int) -> Change:
        # The group's rows in the order of the experts, and what these make of them, in parts and together.
        briefly = (3 * self._rows + self._inner) // self.groups
        return self._while_groups_compute(group, came=self._rows, back=self._rows, briefly=briefly, kept=self._mixed)

    def _backward_of(self, group: int) -> Change:
        came = self._weighted_rows + (0 if self.keeps_graph else self._rows)
        briefly = self._during_experts - self._mixed // self.groups
        return self._while_groups_compute(group, came, self._weighted_rows, briefly, kept=-self._mixed)

    def _while_groups_compute(self, group: int, came: int, back: int, briefly: int, kept: int) -> Change:
        """The first group waits for what `came`, so that what left is free, and makes room for what goes `back`; the
        last one needs it no more. `kept`: what all groups leave of their graphs, or take away."""
        held = back + self._indices if group == 0 else 0
        freed = (self._copies - 1) * came if group == 0 else 0
        freed += came + self._indices if group == self.groups - 1 else 0
        return Change(held, briefly, freed - kept // self.groups)

    @property
    def _boundary(self) -> int:
        return self.graphs.boundary

    @property
    def _rows(self) -> int:
        """[rows, H]"""
        sizes = self.graphs.sizes
        return sizes.allocated(sizes.rows(self.graphs.tokens, Leg.DISPATCH))

    @property
    def _weighted_rows(self) -> int:
        """[rows, H + 1]"""
        sizes = self.graphs.sizes
        return sizes.allocated(sizes.rows(self.graphs.tokens, Leg.DISPATCH_GRADIENT))

    @property
    def _indices(self) -> int:
        """[rows], indices."""
        sizes = self.graphs.sizes
        return sizes.allocated(_INDEX_BYTES * sizes.choices * self.graphs.tokens)

    @property
    def _routed(self) -> int:
        """Hidden features, those behind the norm, where there are shared experts their output, and the weights of
        choices; without the choice."""
        has_shared = self.graphs.sizes.model.shared_expert is not None
        return (2 + has_shared) * self._boundary + self._weights

    @property
    def _weights(self) -> int:
        """[rows], of the router's type."""
        sizes = self.graphs.sizes
        return sizes.allocated(max(4, sizes.compute_bytes) * sizes.choices * self.graphs.tokens)

    @cached_property
    def _inner(self) -> int:
        """What experts keep of their rows besides these."""
        return self.graphs.sizes.choices * self.graphs.kept_of_experts

    @cached_property
    def _mixed(self) -> int:
        """A pass of experts whose graph is kept from the forward pass: the rows, what is made of them, and where these
        were."""
        return self._inner + 2 * self._rows + self._indices if self.keeps_graph else 0

    @cached_property
    def _dense(self) -> int:
        """What autograd keeps of a pass up to the experts: with the weights of rows, before they are in the order of
        the experts and behind that."""
        return self.graphs.kept_up_to_experts + 2 * self._weights

    @cached_property
    def _during_experts(self) -> int:
        """The backward pass of a group, with its forward pass: rows and what is made of them, and gradients of both;
        what experts keep and its first gradients; and the gradients of the parameters."""
        sizes, layer = self.graphs.sizes, self.graphs.layer
        experts = next(unit for unit in sizes.units_of_layer(layer) if unit.is_experts)
        gradients = sizes.allocated(experts.numel * sizes.compute_bytes)
        first = sizes.choices * self.graphs.first_gradients_of_experts
        return (5 * self._rows + self._inner + first) // self.groups + gradients

    @cached_property
    def _during_dense(self) -> int:
        return self.graphs.backward_up_to_experts
