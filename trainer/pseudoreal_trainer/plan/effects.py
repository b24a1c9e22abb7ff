"""Effects of a plan's records: where they run, what they wait for and use, and which bytes they move. Pure.

The one place that interprets records for everything but their execution: `effects_of` for the deadlock check
(`plan.progress`) and the estimated timeline, `transfers_of` for bytes, seconds and the traffic matrix. The engine
counts the same bytes while it runs. The other rules of `plan.check` do not use this module, so that a mistake here
cannot hide from them.

On the rank that executes it:

    record           runs on                 waits for                              uses
    Read             disk                    Update of the step before
    Fetch            copy in, collective     Read, Update of the step before        ranks that use the unit
    a pass           compute                 message, exchanges, Unstash,           working copies; a gradient buffer
                                             SumChoices, Fetch or Update
    Count            experts                                                        the main thread waits for it
    Exchange         experts                 message
    SumChoices       collective
    Send             messages                its Receive
    Stash, Unstash   copy out, copy in
    Reduce           collective, reduction                                          ranks that use the unit; frees the
                                                                                    gradient buffer
    Agree            reduction                                                      all ranks
    Speculate        update                  Reduce
    Update           update                  Agree, Reduce, Speculate

Reductions and agreements run on the reduction thread, updates on the update thread, each in the order of the plan. A
reduction also waits for the second newest update before it (`PENDING_GRADIENTS`); the timeline adds this wait.
"""

from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, assert_never, get_args

from pseudoreal_trainer.plan.expert_parallel import (
    is_first_reuse_of_input,
    is_first_use_of_gradient,
    is_first_use_of_input,
    units_accumulated,
    units_read,
)
from pseudoreal_trainer.plan.layout import Layout, Users
from pseudoreal_trainer.plan.mesh import Fold
from pseudoreal_trainer.plan.records import (
    Agree,
    Backward,
    Count,
    Drop,
    Exchange,
    ExpertBackward,
    ExpertForward,
    Fetch,
    Flow,
    Forward,
    Leg,
    Measure,
    Pass,
    RankPlan,
    Read,
    Receive,
    Recompute,
    Record,
    Reduce,
    Route,
    Send,
    Speculate,
    Stash,
    SumChoices,
    Unstash,
    Update,
)
from pseudoreal_trainer.plan.sizes import Sizes

Traffic = Literal[
    "h2d", "d2h", "disk_read", "disk_write", "collective", "replicas", "pipeline", "experts", "context", "tensor"
]
"""Kind of traffic.

- h2d, d2h: host to device, device to host
- disk_read, disk_write: from disk, to disk
- collective: weights and gradients of units, between the ranks of a replica; and counts of the choices of each expert,
  summed over data ranks
- replicas: weights and gradients of units, between replicas
- pipeline: between pipeline ranks
- experts: between ranks with different experts; and row counts, summed over ranks with the same experts
- context: between the ranks of a context group
- tensor: between tensor ranks
"""
TRAFFIC: tuple[Traffic, ...] = get_args(Traffic)
_COUNT_BYTES = 8
"""Bytes of a token count (int64) in a collective."""


class Resource(StrEnum):
    """Part of a rank that executes one record at a time, concurrently with the other parts."""

    COMPUTE = "compute"
    COPY_IN = "copy in"
    COPY_OUT = "copy out"
    DISK = "disk"
    COLLECTIVE = "collective"
    EXPERTS = "exchange"
    MESSAGES = "message"
    REDUCTION = "reduction"
    """The reduction thread, which ends reductions and agreements in plan order."""
    UPDATE = "update"
    """The update thread, which updates units in plan order."""


CARRIED: dict[Resource, tuple[Traffic, ...]] = {
    Resource.COMPUTE: ("context", "tensor"),
    Resource.COPY_IN: ("h2d",),
    Resource.COPY_OUT: ("d2h",),
    Resource.DISK: ("disk_read",),
    Resource.COLLECTIVE: ("collective", "replicas", "tensor"),
    Resource.EXPERTS: ("experts",),
    Resource.MESSAGES: ("pipeline",),
    Resource.REDUCTION: ("d2h", "disk_write"),
    Resource.UPDATE: ("disk_read", "disk_write"),
}
"""Resource -> kinds of traffic that the resource carries."""


@dataclass(frozen=True, slots=True)
class Effects:
    """Effects of a record on the rank that executes it, besides bytes."""

    resources: tuple[Resource, ...] = ()
    """Resources that execute the record, one after the other."""
    after: tuple[Record, ...] = ()
    """Earlier records of this rank whose results the record uses, as returned by `result`. An Update belongs to the
    previous step. A record may be absent: before the first step there is no Update."""
    message: Receive | None = None
    """Message from another pipeline rank that this record is the first to need."""
    accumulates: tuple[int, ...] = ()
    """Units with a shared gradient buffer to which the record adds a gradient. The first such pass takes the buffer."""
    frees: tuple[int, ...] = ()
    """Units whose gradient buffer, if they have one, is free after the record."""
    partners: Users = ()
    """Pipeline ranks that execute the record together, in one collective; empty: this pipeline rank alone."""


def result(record: Record) -> Record:
    """Return the record as it appears in `Effects.after`: without `wanted_by`."""
    return replace(record, wanted_by=None) if isinstance(record, Read | Fetch) else record


def effects_of(layout: Layout, record: Record) -> Effects:
    match record:
        case Read(unit):
            return Effects((Resource.DISK,), after=(Update(unit),))
        case Fetch(unit):
            after = (Update(unit), Read(unit))
            return Effects((Resource.COPY_IN, Resource.COLLECTIVE), after, partners=_users_of_common(layout, unit))
        case Forward() | Backward() | Route() | ExpertForward() | Recompute() | ExpertBackward():
            return _effects_of_pass(layout, record)
        case Exchange():
            return Effects((Resource.EXPERTS,), message=awaited_message(layout, record))
        case Count():
            return Effects((Resource.EXPERTS,))
        case SumChoices():
            return Effects((Resource.COLLECTIVE,))
        case Send():
            return Effects((Resource.MESSAGES,))
        case Stash():
            return Effects((Resource.COPY_OUT,))
        case Unstash():
            return Effects((Resource.COPY_IN,))
        case Reduce(unit):
            resources = (Resource.COLLECTIVE, Resource.REDUCTION)
            return Effects(resources, frees=(unit,), partners=_users_of_common(layout, unit))
        case Agree():
            return Effects((Resource.REDUCTION,), partners=tuple(range(layout.pipeline)))
        case Speculate(unit):
            return Effects((Resource.UPDATE,), after=(Reduce(unit),))
        case Update(unit):
            early = (Speculate(unit),) if layout.is_speculative(unit) else ()
            return Effects((Resource.UPDATE,), after=(Agree(), Reduce(unit), *early))
        case Drop() | Receive() | Measure():
            return Effects()
        case _:
            assert_never(record)


def _users_of_common(layout: Layout, unit: int) -> Users:
    return layout.users[unit] if layout.is_common(unit) else ()


def _effects_of_pass(layout: Layout, record: Pass) -> Effects:
    key = (record.position, record.micro_batch)
    after: list[Record] = [Exchange(leg, *key) for leg in _awaited_legs(layout, record)]
    if layout.stash and is_first_reuse_of_input(record, layout) and 0 < record.position < layout.head:
        after.append(Unstash(*key))
    if isinstance(record, Backward) and layout.sums_choices(record.position):
        after.append(SumChoices(record.position))
    for unit in units_read(layout, record):
        after.append(Fetch(unit) if layout.moves(unit) or layout.refreshed(unit) else Update(unit))
    return Effects(
        (Resource.COMPUTE,),
        tuple(after),
        awaited_message(layout, record),
        tuple(filter(layout.has_gradient_shard, units_accumulated(layout, record))),
    )


def _awaited_legs(layout: Layout, record: Pass) -> tuple[Leg, ...]:
    """Return the exchanges whose rows a pass needs."""
    if not layout.spreads(record.position):
        return ()
    match record:
        case Route() | Recompute():
            return ()
        case ExpertForward():
            return (Leg.DISPATCH,)
        case Forward():
            return (Leg.COMBINE,)
        case ExpertBackward():
            return (Leg.DISPATCH_AGAIN, Leg.COMBINE_GRADIENT) if layout.recompute else (Leg.COMBINE_GRADIENT,)
        case Backward():
            return (Leg.DISPATCH_GRADIENT,)


def awaited_message(layout: Layout, record: Record) -> Receive | None:
    """Return the message from another pipeline rank that this record is the first to need; None if there is no such
    message."""
    if is_first_use_of_input(record, layout):
        return _message(layout, Flow.ACTIVATION, record.position, record.micro_batch)
    if is_first_use_of_gradient(record, layout):
        return _message(layout, Flow.GRADIENT, record.position + 1, record.micro_batch)
    return None


def _message(layout: Layout, flow: Flow, boundary: int, micro_batch: int) -> Receive | None:
    """Return the message over the boundary before a position; None if both sides are on one rank."""
    if boundary == 0 or (below := layout.rank_of(boundary - 1)) == (above := layout.rank_of(boundary)):
        return None
    return Receive(flow, boundary, micro_batch, below if flow is Flow.ACTIVATION else above)


Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
"""Collective operation."""


@dataclass(frozen=True, slots=True)
class Group:
    """Group of communicating ranks, seen from one pipeline rank.

    - holders: the ranks of a replica with the same units of `fold`, on all pipeline ranks in `users`
    - replicas: the ranks with the same index in all replicas
    - data: the data ranks of the pipeline rank
    - experts: an expert-parallel group: ranks of a replica that together hold all experts of a layer
    - same experts: the data ranks with the same experts
    - context: a context group: ranks with different parts of the same sequences
    - tensor: the tensor ranks, with slices of the same matrices
    - peer: two pipeline ranks
    """

    kind: Literal["holders", "replicas", "data", "experts", "same experts", "context", "tensor", "peer"]
    fold: Fold = "None"
    users: Users = ()
    """Pipeline ranks that use the units (holders), or the pipeline rank that receives (peer)."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes that a rank moves for a record."""

    traffic: Traffic
    size: int
    """Bytes that the rank sends, or copies."""
    group: Group | None = None
    """Ranks between which the bytes move; None: the bytes move between the rank's own device, host and disk."""
    operation: Operation | None = None
    """Collective operation; None: messages or a copy."""


def traffic_bytes(layout: Layout, sizes: Sizes, records: RankPlan) -> Counter[Traffic]:
    """Return kind of traffic -> bytes that a rank sends or copies in a step, on the data rank with the largest part of
    a micro-batch."""
    total: Counter[Traffic] = Counter()
    for record in records:
        for transfer in transfers_of(layout, sizes, record):
            total[transfer.traffic] += transfer.size
    return total


def transfers_of(layout: Layout, sizes: Sizes, record: Record) -> list[Transfer]:
    """Return the transfers of one record. Exchanges are counted as if all experts got equally many tokens and none were
    full, so every group of experts is fetched."""
    match record:
        case Read(unit):
            return [Transfer("disk_read", sizes.shard(layout, unit) * sizes.compute_bytes)]
        case Fetch(unit):
            shard = sizes.shard(layout, unit) * sizes.compute_bytes
            from_host = shard if layout.home(unit) != "Device" else 0
            return [Transfer("h2d", from_host), *_between_shards(layout, unit, shard, "all_gather")]
        case Reduce(unit):
            return _reduction(layout, sizes, unit)
        case Update(unit):
            return _update_on_disk(layout, sizes, unit) if layout.home(unit) == "Disk" else []
        case Count(position, _, micro_batches):
            size = _to_other_ranks(layout, micro_batches * sizes.experts * _COUNT_BYTES)
            return [Transfer("experts", size, Group("experts")), *_agreement_on_groups(layout, position)]
        case SumChoices():
            size = 2 * (layout.data - 1) * sizes.experts * _COUNT_BYTES // layout.data
            return [Transfer("collective", size, Group("data"), "all_reduce")]
        case Exchange(leg):
            size = _to_other_ranks(layout, sizes.exchange_bytes(sizes.max_tokens(layout), leg))
            return [Transfer("experts", size, Group("experts"))]
        case Send(peer=peer):
            size = sizes.boundary(sizes.max_tokens(layout))
            return [Transfer("pipeline", size, Group("peer", users=(peer,)))]
        case Stash():
            return [Transfer("d2h", sizes.boundary(sizes.max_tokens(layout)))]
        case Unstash():
            return [Transfer("h2d", sizes.boundary(sizes.max_tokens(layout)))]
        case Forward() | Backward() | Route() | ExpertForward() | Recompute() | ExpertBackward():
            return [*_over_context_ranks(layout, sizes, record), *_over_tensor_ranks(layout, sizes, record)]
        case Drop() | Receive() | Speculate() | Agree() | Measure():
            return []  # an Agree sends a few numbers, which are not counted
        case _:
            assert_never(record)


def _over_context_ranks(layout: Layout, sizes: Sizes, record: Pass) -> list[Transfer]:
    """Return the transfers of keys and values, or of their gradients, in the attention of a pass."""
    if layout.context_ranks == 1 or not 0 < record.position < layout.head:
        return []
    spreads = layout.spreads(record.position)
    match record:
        case Forward() | Route() | Recompute():
            operations: list[Operation] = [] if isinstance(record, Forward) and spreads else ["all_gather"]
        case Backward():
            again: list[Operation] = ["all_gather"] if layout.recompute and not spreads else []
            operations = [*again, "all_to_all"]
        case _:
            operations = []
    # A tensor rank has the keys and values of its own heads, for the tokens of all ranks with slices of the layer.
    tokens = layout.tensor_ranks * sizes.max_tokens(layout)
    size = (layout.context_ranks - 1) * 2 * sizes.key_size(layout) * sizes.compute_bytes * tokens
    return [Transfer("context", size, Group("context"), operation) for operation in operations]


def _over_tensor_ranks(layout: Layout, sizes: Sizes, record: Pass) -> list[Transfer]:
    """Return the transfers of tokens to all tensor ranks, and of sums of outputs back, in a pass."""
    if layout.tensor_ranks == 1:
        return []
    if record.position in (0, layout.head):
        return _over_slices_of_vocabulary(layout, sizes, record) if layout.slices_vocabulary else []
    layer, spreads = record.position - 1, layout.spreads(record.position)
    parts = sizes.sliced_parts(layer)
    match record:
        case Forward() | Route() | Recompute():
            operations: list[Operation] = [] if isinstance(record, Forward) and spreads else _SLICED * parts
        case Backward():
            again: list[Operation] = _SLICED * parts if layout.recompute and not spreads else []
            # The sum of the last product's outputs is not read.
            unread = bool(again) and sizes.leaves_out_last_product(layer)
            operations = [*(again[:-1] if unread else again), *_SLICED * parts]
        case _:
            operations = []
    boundary = sizes.boundary_unrounded(sizes.max_tokens(layout))
    size = (layout.tensor_ranks - 1) * boundary
    return [Transfer("tensor", size, Group("tensor"), operation) for operation in operations]


def _over_slices_of_vocabulary(layout: Layout, sizes: Sizes, record: Pass) -> list[Transfer]:
    """Return the transfers of a pass of the embedding, or of the head with the loss: embeddings, features and their
    gradients, and two numbers of each token of all tensor ranks."""
    is_head, is_backward = record.position == layout.head, isinstance(record, Backward)
    others, tokens = layout.tensor_ranks - 1, sizes.max_tokens(layout)
    operations: list[Operation] = ["all_gather"] if is_head or is_backward else ["all_to_all"]
    if is_head and is_backward:
        operations.append("all_to_all")
    size = others * sizes.boundary_unrounded(tokens)
    found = [Transfer("tensor", size, Group("tensor"), operation) for operation in operations]
    if is_head:
        numbers = others * 2 * sizes.loss_tokens(layout) * sizes.master_bytes
        found.append(Transfer("tensor", numbers, Group("tensor"), "all_gather"))
    return found


_SLICED: list[Operation] = ["all_gather", "all_to_all"]
"""Operations around attention or an MLP with slices of matrices: a gather of its input, and a sum of its outputs. In
the backward pass the sum's gradient is gathered, and the gather's gradient is summed."""


def _to_other_ranks(layout: Layout, size: int) -> int:
    """Return the bytes that leave a rank, if `size` bytes are divided evenly among the ranks with a layer's experts."""
    return size * (layout.expert_ranks - 1) // layout.expert_ranks


def _agreement_on_groups(layout: Layout, position: int) -> list[Transfer]:
    """Return the transfers by which ranks that gather groups of experts together agree on the groups to fetch: an
    all-reduce of row counts."""
    if not layout.asks_for_groups(position) or layout.sharding == "None":
        return []
    holders = layout.data // layout.expert_ranks
    size = 2 * (holders - 1) * layout.expert_groups * _COUNT_BYTES // holders
    return [Transfer("experts", size, Group("same experts"), "all_reduce")]


def _reduction(layout: Layout, sizes: Sizes, unit: int) -> list[Transfer]:
    """Return the transfers of a reduction. Sharded gradients use a reduce-scatter; whole gradients use an all-reduce,
    which is a reduce-scatter and an all-gather."""
    shard, home = sizes.shard(layout, unit) * sizes.master_bytes, layout.home(unit)
    if layout.shards(unit) > 1:
        summed = _between_shards(layout, unit, shard, "reduce_scatter")
    else:
        holders = layout.holders(unit)
        size = 2 * (holders - 1) * shard // holders
        summed = [Transfer("collective", size, _holders(layout, unit), "all_reduce")]
    kept = sizes.shard(layout, unit) * sizes.gradient_bytes
    return [
        *_sums_of_replicated(layout, sizes, unit),
        *summed,
        Transfer("d2h", kept if home != "Device" else 0),
        Transfer("disk_write", kept if home == "Disk" and layout.keeps_gradients else 0),
    ]


def _sums_of_replicated(layout: Layout, sizes: Sizes, unit: int) -> list[Transfer]:
    """Return the transfers in which tensor ranks sum the gradients of the tensors that they all have."""
    ranks = layout.tensor_ranks
    replicated = (sizes.master_bytes * len(elements) for elements in sizes.units[unit].replicated)
    return [Transfer("tensor", 2 * (ranks - 1) * size // ranks, Group("tensor"), "all_reduce") for size in replicated]


def _between_shards(layout: Layout, unit: int, shard: int, operation: Operation) -> list[Transfer]:
    """Return a rank's transfers for a gather of a unit, or for a sum to shards. `shard`: bytes of each shard. Shards
    are gathered across replicas, then within the replica; sums are scattered in the opposite order."""
    across = shard * layout.parts_of_replica
    return [
        Transfer("collective", layout.shards(unit) * shard - across, _holders(layout, unit), operation),
        Transfer("replicas", across - shard, Group("replicas"), operation),
    ]


def _holders(layout: Layout, unit: int) -> Group:
    return Group("holders", layout.fold_of(unit), layout.users[unit])


def _update_on_disk(layout: Layout, sizes: Sizes, unit: int) -> list[Transfer]:
    shard = sizes.shard(layout, unit)
    gradient = sizes.gradient_bytes if layout.keeps_gradients else 0
    copy = sizes.compute_bytes if sizes.has_own_copies else 0
    of_muon, of_adamw, two_vectors = 0, shard, 2 * sizes.master_bytes
    if sizes.uses_muon:
        described = sizes.units[unit]
        of_muon = described.hidden_in_pages
        of_adamw = shard - sizes.without_second_moment(unit) if described.hidden < described.numel else 0
    return [
        Transfer("disk_read", sizes.state_bytes(of_adamw) + of_adamw * gradient + of_muon * (two_vectors + gradient)),
        Transfer("disk_write", sizes.state_bytes(of_adamw) + of_adamw * copy + of_muon * (two_vectors + copy)),
    ]
