"""The records of a step plan. A rank's plan is a tuple of records, executed in order.

Positions count the model's chain: 0 is the embedding, 1..L are the layers, L + 1 is the final norm with the head and
the loss. A unit is an index into the model's units; layers that share a block use the same unit.

The plan of a rank for two layers, two micro-batches and a window of two, with stateSharding Full. A pass has a position
and a micro-batch, the other records have a unit:

    Fetch(0) Fetch(1)
    Forward(0, 0) Forward(0, 1)
    Drop(0) Fetch(2)                    layer 2 arrives while layer 1 computes
    Forward(1, 0) Forward(1, 1)
    Drop(1) Fetch(3)
    Forward(2, 0) Forward(2, 1)
    Backward(3, 0) Backward(3, 1)       the head: forward, loss and backward of one micro-batch at a time
    Reduce(3) Drop(3) Fetch(1)          layer 2 has stayed in the window
    Backward(2, 0) Backward(2, 1)
    Reduce(2) Drop(2) Fetch(0)
    Backward(1, 0) Backward(1, 1)
    Reduce(1) Drop(1)
    Backward(0, 0) Backward(0, 1)
    Reduce(0) Drop(0)
    Agree()                             loss, requests to stop, norm: one all-reduce over all ranks
    Update(0) Update(1) Update(2) Update(3)

If a layer's experts are spread over ranks, its passes have parts, between which tokens travel to their experts and back
(`plan.expert_parallel` defines the order):

    Route(1, 0) Route(1, 1) Count(1, 0, 2)                      attention and router; counts of tokens
    Exchange(dispatch, 1, 0) Exchange(dispatch, 1, 1)           the second travels while experts compute the first
    ExpertForward(1, 0) Exchange(combine, 1, 0)
    ExpertForward(1, 1) Exchange(combine, 1, 1) Forward(1, 0) Forward(1, 1)

If a rank's experts are cut into groups, each group computes on the rows of all micro-batches before the next group:

    Route(1, 0) Route(1, 1) Count(1, 0, 2)
    Exchange(dispatch, 1, 0) Exchange(dispatch, 1, 1)
    ExpertForward(1, 0, 0) ExpertForward(1, 1, 0)               the first group; then it makes room for the second
    ExpertForward(1, 0, 1) ExpertForward(1, 1, 1)
    Exchange(combine, 1, 0) Exchange(combine, 1, 1) Forward(1, 0) Forward(1, 1)

`plan.lower` makes a plan from the order of the passes, `plan.check` proves the plan; both before the first step.
"""

from dataclasses import dataclass
from enum import Enum


class Flow(Enum):
    """Message between two pipeline ranks, over the boundary before a position."""

    ACTIVATION = "activation"
    """Input of the position, sent forward."""
    GRADIENT = "gradient"
    """Gradient of the position's input, sent backward."""


class Leg(Enum):
    """All-to-all exchange between the ranks over which a layer's experts are spread."""

    DISPATCH = "dispatch"
    """Tokens, to the ranks of their experts."""
    COMBINE = "combine"
    """Outputs of the experts, back to the ranks of the tokens."""
    DISPATCH_AGAIN = "dispatch again"
    """Tokens once more, for a backward pass that recomputes the forward pass."""
    COMBINE_GRADIENT = "combine gradient"
    """Gradients of the combined outputs, with the routing weights of the tokens, to the ranks of the experts."""
    DISPATCH_GRADIENT = "dispatch gradient"
    """Gradients of tokens and of their routing weights, to the ranks of the tokens."""


@dataclass(frozen=True, slots=True)
class Read:
    """Start to read a unit's weights from disk into a read-ahead buffer."""

    unit: int
    wanted_by: int | None = None
    """Position whose tokens need a group of experts, as in `Fetch`."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Start to make a unit's working copy: from its home, from the shards of the ranks that use the unit, or both.

    Pipeline ranks that share the unit gather it once, before everything else. Later, a rank could wait in the gather
    for a rank that waits for one of its messages.
    """

    unit: int
    wanted_by: int | None = None
    """Position whose tokens need a group of experts. If no tokens were routed to the group, the unit is neither fetched
    nor dropped. None: the unit is always fetched."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Discard a working copy; its slot of the window becomes free."""

    unit: int


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward pass. At the head it computes the loss without gradients, for evaluations."""

    position: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Backward:
    """A backward pass. Adds to the gradients of the position's units. At the head it contains the forward pass and the
    loss."""

    position: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Route:
    """The part of a layer's forward pass before spread experts: attention, the router, and the choice of experts, which
    is kept for the backward pass. `Forward` then only adds up the experts' outputs."""

    position: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Count:
    """Exchange row counts: how many tokens the experts of each rank get, and from which ranks. One record covers a run
    of consecutive micro-batches, so that the host waits for counts only once."""

    position: int
    first: int
    """Index of the first micro-batch."""
    micro_batches: int


@dataclass(frozen=True, slots=True)
class SumChoices:
    """Sum over all micro-batches and data ranks how often each expert of a layer was chosen. Needed by a loss that
    depends on the choices of the whole step."""

    position: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Start to send rows to the ranks of a layer's experts, or back. The record that needs the rows waits for them."""

    leg: Leg
    position: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class ExpertForward:
    """Forward pass of a group of this rank's experts, on the tokens routed to them."""

    position: int
    micro_batch: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class Recompute:
    """Repeat the computation of `Route` with an autograd graph, and with the routing decision of `Route`."""

    position: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class ExpertBackward:
    """Backward pass of a group of this rank's experts. Adds to the group's gradient. Contains the forward pass, unless
    its graph was kept."""

    position: int
    micro_batch: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class Send:
    """Start to send the input of a position, or its gradient, to another pipeline rank."""

    flow: Flow
    position: int
    micro_batch: int
    peer: int
    """Pipeline rank that receives."""


@dataclass(frozen=True, slots=True)
class Receive:
    """Start to receive a tensor. The record that needs the tensor waits for it."""

    flow: Flow
    position: int
    micro_batch: int
    peer: int


@dataclass(frozen=True, slots=True)
class Stash:
    """Move the input of a position to the host, where it waits for the backward pass."""

    position: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Unstash:
    """Bring the offloaded input of a position back to the device."""

    position: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Complete a unit's gradient and start its sum over the ranks that use the unit, to whole gradients or to shards.

    If several pipeline ranks use the unit, the record follows all passes. Pipeline ranks complete their parts at
    different times; after all passes, no rank waits in the sum for a rank that still needs a message from it.
    """

    unit: int


@dataclass(frozen=True, slots=True)
class Speculate:
    """Start a unit's optimizer step before the norm of the whole gradient is known, as if it were not clipped, and keep
    the old state. `Update` then keeps the result, or restores the old state and updates again."""

    unit: int


@dataclass(frozen=True, slots=True)
class Agree:
    """Sum values over all ranks, so that each rank knows them: the loss, requests to stop, and with global clipping the
    norm."""


@dataclass(frozen=True, slots=True)
class Update:
    """Start a unit's optimizer step; after `Speculate`, complete it."""

    unit: int


@dataclass(frozen=True, slots=True)
class Measure:
    """Complete the gradient of one layer in a shared block: sum it over the data ranks, and compare it with the
    gradient of the next layer above that uses the block. In measuring plans only."""

    position: int


Record = (
    Read
    | Fetch
    | Drop
    | Forward
    | Backward
    | Route
    | Count
    | SumChoices
    | Exchange
    | ExpertForward
    | Recompute
    | ExpertBackward
    | Send
    | Receive
    | Stash
    | Unstash
    | Measure
    | Reduce
    | Speculate
    | Agree
    | Update
)
Compute = Forward | Backward
Pass = Compute | Route | ExpertForward | Recompute | ExpertBackward
"""Records that compute for a position and a micro-batch."""
RankPlan = tuple[Record, ...]
Plan = tuple[RankPlan, ...]
"""Plan of each pipeline rank; all data ranks of a pipeline rank have the same plan."""
