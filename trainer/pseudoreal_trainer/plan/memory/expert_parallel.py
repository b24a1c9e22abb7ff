"""Bytes of the parts of passes through expert-parallel experts. Pure.

Send buffers stay in memory as long as the received rows. A rank that has all experts exchanges rows with itself, and
has one copy of the rows. Each group of experts computes on its share of a micro-batch's rows. The rows received for all
groups, and the rows to send back, live from the first group to the last.

The number of rows that a rank's experts receive depends on the data. Here all experts receive the same number, and
refuse none. If a rank's experts receive twice as many rows, it needs twice the bytes of rows.
"""

from dataclasses import dataclass
from functools import cached_property

from pseudoreal_trainer.plan.expert_parallel import PassPart
from pseudoreal_trainer.plan.memory.autograd_memory import AutogradMemory
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

_INDEX_BYTES = 8


@dataclass(frozen=True)
class Change:
    """Bytes of device memory that a record allocates and frees."""

    held: int = 0
    """Bytes allocated by the record. They stay allocated afterwards, except for `freed`."""
    briefly: int = 0
    """Temporary bytes while the record runs, in addition to `held`."""
    freed: int = 0
    """Bytes freed after the record."""


@dataclass(frozen=True)
class ExpertParallelBytes:
    """Bytes of the parts of a layer's passes over `graphs.tokens` tokens."""

    graphs: AutogradMemory
    saves_graph: bool
    ranks: int
    """Number of ranks over which the experts are spread."""
    groups: int
    """Number of groups of a rank's experts."""

    def change(self, record: PassPart) -> Change:
        match record:
            case Route():
                return Change(held=self._routed + self.graphs.routing + (self._dense if self.saves_graph else 0))
            case Exchange(leg):
                return self._exchanged(leg)
            case ExpertForward(group=group):
                return self._forward_of(group)
            case Forward():
                # The received rows, weighted, and in the order of the tokens. The routing decision stays.
                return Change(self._boundary, briefly=2 * self._rows, freed=self._copies * self._rows + self._routed)
            case Recompute():
                return Change(self._dense + self._rows, briefly=self._rows)
            case ExpertBackward(group=group):
                return self._backward_of(group)
            case Backward():
                return Change(
                    briefly=max(0, self._during_dense - self._dense),
                    # The input and the gradient of the output are freed. The gradient of the input replaces one of
                    # them.
                    freed=self._copies * self._weighted_rows + self._dense + self.graphs.routing + self._boundary,
                )
        return Change()

    @property
    def _copies(self) -> int:
        """Number of copies of exchanged rows in memory: as sent and as received."""
        return 2 if self.ranks > 1 else 1

    def _exchanged(self, leg: Leg) -> Change:
        """Return the change by an exchange: the received rows and, if the exchange creates the rows to send, these as
        well."""
        size = self._weighted_rows if leg in (Leg.COMBINE_GRADIENT, Leg.DISPATCH_GRADIENT) else self._rows
        makes = leg in (Leg.DISPATCH, Leg.COMBINE_GRADIENT)
        return Change(held=(self._copies - 1 + makes) * size, briefly=self._rows if makes else 0)

    def _forward_of(self, group: int) -> Change:
        # The group's rows in the order of the experts, and the experts' outputs, in parts and concatenated.
        briefly = (3 * self._rows + self._mlp_intermediates + self._recomputed) // self.groups
        return self._while_groups_compute(group, came=self._rows, back=self._rows, briefly=briefly, kept=self._mixed)

    def _backward_of(self, group: int) -> Change:
        came = self._weighted_rows + (0 if self.saves_graph else self._rows)
        briefly = self._during_experts - self._mixed // self.groups
        return self._while_groups_compute(group, came, self._weighted_rows, briefly, kept=-self._mixed)

    def _while_groups_compute(self, group: int, came: int, back: int, briefly: int, kept: int) -> Change:
        """Return the change by a group's computation.

        `came`: bytes of the received rows. The first group waits for these rows, which frees the send buffers; the last
        group frees the rows. `back`: bytes of the rows to send back, allocated by the first group. `kept`: bytes of
        graphs that all groups together add; negative if they free graphs.
        """
        held = back + self._indices if group == 0 else 0
        freed = (self._copies - 1) * came if group == 0 else 0
        freed += came + self._indices if group == self.groups - 1 else 0
        return Change(held, briefly, freed - kept // self.groups)

    @property
    def _boundary(self) -> int:
        return self.graphs.boundary

    @property
    def _rows(self) -> int:
        """Bytes of the rows, [rows, H]."""
        sizes = self.graphs.sizes
        return sizes.allocated(sizes.exchange_bytes(self.graphs.tokens, Leg.DISPATCH))

    @property
    def _weighted_rows(self) -> int:
        """Bytes of the rows with a weight each, [rows, H + 1]."""
        sizes = self.graphs.sizes
        return sizes.allocated(sizes.exchange_bytes(self.graphs.tokens, Leg.DISPATCH_GRADIENT))

    @property
    def _indices(self) -> int:
        """Bytes of an index per row, [rows]."""
        sizes = self.graphs.sizes
        return sizes.allocated(_INDEX_BYTES * sizes.choices * self.graphs.tokens)

    @property
    def _routed(self) -> int:
        """Bytes that routing leaves in memory, without the routing decision: the hidden features, the features after
        the norm, the output of shared experts if there are any, and a weight per row."""
        has_shared = self.graphs.sizes.model.shared_expert is not None
        return (2 + has_shared) * self._boundary + self._weights

    @property
    def _weights(self) -> int:
        """Bytes of a weight per row, [rows], in the router's type."""
        sizes = self.graphs.sizes
        return sizes.allocated(max(4, sizes.compute_bytes) * sizes.choices * self.graphs.tokens)

    @cached_property
    def _mlp_intermediates(self) -> int:
        """Bytes that experts save for backward in addition to their input and output rows."""
        return self.graphs.sizes.choices * self.graphs.expert_intermediates

    @cached_property
    def _recomputed(self) -> int:
        """Bytes of the MLP intermediates that the backward pass recomputes."""
        return self.graphs.sizes.choices * self.graphs.recomputed_expert_intermediates

    @cached_property
    def _mixed(self) -> int:
        """Bytes of the experts' autograd graph that the forward pass saves: input rows, output rows, intermediates
        and row indices; 0 if graphs are not saved."""
        return self._mlp_intermediates + 2 * self._rows + self._indices if self.saves_graph else 0

    @cached_property
    def _dense(self) -> int:
        """Bytes saved for backward up to the experts, including the weights of rows before and after sorting by
        expert."""
        return self.graphs.saved_up_to_experts + 2 * self._weights

    @cached_property
    def _during_experts(self) -> int:
        """Peak bytes of the backward pass of a group, including its forward pass: input and output rows, and the
        gradients of both; tensors saved by experts and their first gradients; and the gradients of the parameters."""
        sizes, layer = self.graphs.sizes, self.graphs.layer
        experts = next(unit for unit in sizes.units_of_layer(layer) if unit.is_experts)
        gradients = sizes.allocated(experts.numel * sizes.compute_bytes)
        first = sizes.choices * self.graphs.expert_first_gradients
        return (5 * self._rows + self._mlp_intermediates + self._recomputed + first) // self.groups + gradients

    @cached_property
    def _during_dense(self) -> int:
        return self.graphs.backward_up_to_experts
