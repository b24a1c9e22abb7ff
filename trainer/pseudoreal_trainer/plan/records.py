"""The records of a step plan. A rank's plan is a tuple of them, executed from first to last.

Positions count the model's chain: 0 is the embedding, 1..L are the layers, L + 1 is the final norm with the head and
the loss. A unit is an index into the model's units; layers that share a block use the same unit.

This is the plan of a rank for two layers, two micro-batches and a window of two, with stateSharding Full. A pass has a
position and a micro-batch, the other records have a unit:

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
    Agree()                             the loss, the wish to stop, the norm: one sum over all ranks
    Update(0) Update(1) Update(2) Update(3)

Where a layer's experts are spread over ranks, its passes have parts, between which tokens go to their experts and come
back (`spread` says in which order):

    Route(1, 0) Route(1, 1) Count(1, 0, 2)                      attention and router; who gets how many tokens
    Exchange(dispatch, 1, 0) Exchange(dispatch, 1, 1)           the second under the experts of the first
    ExpertForward(1, 0) Exchange(combine, 1, 0)
    ExpertForward(1, 1) Exchange(combine, 1, 1) Forward(1, 0) Forward(1, 1)

Where these come and go in groups, the rows of all micro-batches wait for one group after the other:

    Route(1, 0) Route(1, 1) Count(1, 0, 2)
    Exchange(dispatch, 1, 0) Exchange(dispatch, 1, 1)
    ExpertForward(1, 0, 0) ExpertForward(1, 1, 0)               the first group; then it makes room for the second
    ExpertForward(1, 0, 1) ExpertForward(1, 1, 1)
    Exchange(combine, 1, 0) Exchange(combine, 1, 1) Forward(1, 0) Forward(1, 1)

`lower` makes a plan from the order of the passes, `check` proves it; both before the first step.
"""

from dataclasses import dataclass
from enum import Enum


class Flow(Enum):
    """What passes between two pipeline ranks at the boundary before a position."""

    ACTIVATION = "activation"
    """The position's input, on its way forward."""
    GRADIENT = "gradient"
    """The gradient of the position's input, on its way backward."""


class Leg(Enum):
    """What goes between the ranks over which a layer's experts are spread."""

    DISPATCH = "dispatch"
    """Tokens to the ranks of their experts."""
    COMBINE = "combine"
    """What the experts made of them, back."""
    DISPATCH_AGAIN = "dispatch again"
    """Tokens once more, for a backward pass that computes the forward pass again."""
    COMBINE_GRADIENT = "combine gradient"
    """Gradients of what came back, with the tokens' weights, to the ranks of the experts."""
    DISPATCH_GRADIENT = "dispatch gradient"
    """Gradients of tokens and of their weights, back."""


@dataclass(frozen=True, slots=True)
class Read:
    """Starts to read a unit's weights from disk into a read-ahead buffer."""

    unit: int
    wanted_by: int | None = None
    """The same as in `Fetch`."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Starts to make a unit's working copy: from its home, from the shards of the ranks that use the unit, or both.
    Where several pipeline ranks use it, they gather it once, before all else: none then waits for another one that
    waits for it."""

    unit: int
    wanted_by: int | None = None
    """Position whose tokens want a group of experts: where none came for the group, nothing is fetched, and nothing is
    there to be dropped. None: the unit is fetched in any case."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Ends a working copy; its slot of the window is free."""

    unit: int


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward pass. At the head: the loss alone, without gradients (evaluation)."""

    position: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Backward:
    """A backward pass, which adds to the gradient of the position's unit. At the head it contains the forward pass and
    the loss."""

    position: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Route:
    """The part of a layer's forward pass before its spread experts: attention, the router, and the choice of experts,
    which is kept for the backward pass. What is left for `Forward` is the sum."""

    position: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Count:
    """Tells each rank how many tokens its experts get, and from whom: for neighbouring micro-batches at once, as the
    host has to wait for it."""

    position: int
    first: int
    """The first of the micro-batches."""
    micro_batches: int


@dataclass(frozen=True, slots=True)
class SumChoices:
    """Sums over all micro-batches and data ranks how often each expert of a layer was chosen, for a loss that depends
    on the choices of the whole step."""

    position: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Starts to send rows to the ranks that have a layer's experts, or back; who needs them waits for them."""

    leg: Leg
    position: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class ExpertForward:
    """The forward pass of a group of this rank's experts, on the tokens that came to them."""

    position: int
    micro_batch: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class Recompute:
    """Computes what `Route` did again, with its graph and by the choice that it made."""

    position: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class ExpertBackward:
    """The backward pass of a group of this rank's experts, which adds to their gradient; with the forward pass, unless
    its graph was kept."""

    position: int
    micro_batch: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class Send:
    flow: Flow
    position: int
    micro_batch: int
    peer: int
    """The pipeline rank that receives."""


@dataclass(frozen=True, slots=True)
class Receive:
    """Starts to receive; the record that needs the tensor waits for it."""

    flow: Flow
    position: int
    micro_batch: int
    peer: int


@dataclass(frozen=True, slots=True)
class Stash:
    """Moves the input of a position to the host, where it waits for the backward pass."""

    position: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Unstash:
    """Brings the stashed input of a position back to the device."""

    position: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Ends a unit's gradient: starts its sum over the ranks that use the unit, to whole gradients or to shards. Where
    these are several pipeline ranks, it comes behind all passes: they end their parts at different times, and none
    waits there for a rank that needs a message from it."""

    unit: int


@dataclass(frozen=True, slots=True)
class Agree:
    """Sums over all ranks what everybody must know: the loss, the wish to stop, and with global clipping the norm."""


@dataclass(frozen=True, slots=True)
class Update:
    """Starts a unit's optimizer step."""

    unit: int


@dataclass(frozen=True, slots=True)
class Measure:
    """Ends the gradient that one layer has in a block that it shares: sums it over the data ranks and compares it with
    that of the next layer above which uses the block. In measuring plans only."""

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
    | Agree
    | Update
)
Compute = Forward | Backward
Pass = Compute | Route | ExpertForward | Recompute | ExpertBackward
"""Records that compute something of a position and a micro-batch."""
RankPlan = tuple[Record, ...]
Plan = tuple[RankPlan, ...]
"""The plan of each pipeline rank; data ranks of one pipeline rank have the same."""
