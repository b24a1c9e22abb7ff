"""Bytes that the records of a plan move over buses and networks. Pure; the engine counts the same while it runs."""

from collections import Counter
from typing import Literal, get_args

from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.records import (
    Count,
    Exchange,
    Fetch,
    RankPlan,
    Read,
    Record,
    Reduce,
    Send,
    Stash,
    SumChoices,
    Unstash,
    Update,
)
from pseudoreal_trainer.plan.sizes import MOMENTS, Sizes

Traffic = Literal["h2d", "d2h", "disk_read", "disk_write", "collective", "replicas", "pipeline", "experts"]
"""Kind of traffic.

- h2d, d2h: host to device, device to host
- disk_read, disk_write: from disk, to disk
- collective: between the ranks of a replica that use a unit
- replicas: between replicas
- pipeline: between pipeline ranks
- experts: between ranks with different experts, including the token counts exchanged by ranks with the same experts
"""
COUNT_BYTES = 8
"""Bytes of a token count in a message."""
TRAFFIC: tuple[Traffic, ...] = get_args(Traffic)


def traffic_bytes(layout: Layout, sizes: Sizes, records: RankPlan) -> Counter[Traffic]:
    """Return the bytes of each kind that a rank sends or moves in a step, for the data rank with the largest part of a
    micro-batch."""
    total: Counter[Traffic] = Counter()
    for record in records:
        total.update(moved(layout, sizes, record))
    return total


def moved(layout: Layout, sizes: Sizes, record: Record) -> dict[Traffic, int]:
    """Return the bytes of each kind that one record moves. Exchanges are counted as if all experts got equally many
    tokens and none were full, so every group of experts is fetched."""
    match record:
        case Read(unit):
            return {"disk_read": sizes.shard(layout, unit) * sizes.compute_bytes}
        case Fetch(unit):
            return _fetched(layout, sizes, unit)
        case Reduce(unit):
            return _reduced(layout, sizes, unit)
        case Update(unit) if layout.home(unit) == "Disk":
            return _updated_on_disk(layout, sizes, unit)
        case Count(position, _, micro_batches):
            told = _elsewhere(layout, micro_batches * sizes.experts * COUNT_BYTES)
            return {"experts": told + agreed(layout, position)}
        case SumChoices():
            return {"collective": 2 * (layout.data - 1) * sizes.experts * COUNT_BYTES // layout.data}
        case Exchange(leg):
            return {"experts": _elsewhere(layout, sizes.exchange_bytes(sizes.max_tokens(layout.data), leg))}
        case Send():
            return {"pipeline": sizes.boundary(sizes.max_tokens(layout.data))}
        case Stash():
            return {"d2h": sizes.boundary(sizes.max_tokens(layout.data))}
        case Unstash():
            return {"h2d": sizes.boundary(sizes.max_tokens(layout.data))}
    return {}


def _elsewhere(layout: Layout, size: int) -> int:
    """Return the bytes that leave a rank, out of `size` bytes spread evenly over the ranks with a layer's experts."""
    return size * (layout.expert_ranks - 1) // layout.expert_ranks


def agreed(layout: Layout, position: int) -> int:
    """Return the bytes in which ranks that gather groups of experts together agree on the groups that received
    tokens."""
    if not layout.asks_for_groups(position) or layout.sharding == "None":
        return 0
    holders = layout.data // layout.expert_ranks
    return 2 * (holders - 1) * layout.expert_groups * COUNT_BYTES // holders


def _fetched(layout: Layout, sizes: Sizes, unit: int) -> dict[Traffic, int]:
    shard = sizes.shard(layout, unit) * sizes.compute_bytes
    return {
        "h2d": shard if layout.home(unit) != "Device" else 0,
        **_between_shards(layout, unit, shard),
    }


def _reduced(layout: Layout, sizes: Sizes, unit: int) -> dict[Traffic, int]:
    """Return the bytes of a reduction of each kind. Sharded gradients use a reduce-scatter; whole gradients use an
    all-reduce, which is a reduce-scatter and an all-gather."""
    part = sizes.shard(layout, unit) * sizes.master_bytes
    holders = layout.holders(unit)
    to_wholes: dict[Traffic, int] = {"collective": 2 * (holders - 1) * part // holders}
    home = layout.home(unit)
    return {
        **(_between_shards(layout, unit, part) if layout.shards(unit) > 1 else to_wholes),
        "d2h": part if home != "Device" else 0,
        "disk_write": part if home == "Disk" and layout.keeps_gradients else 0,
    }


def _between_shards(layout: Layout, unit: int, part: int) -> dict[Traffic, int]:
    """Return the bytes that a rank sends when shards of `part` bytes are gathered across replicas and then within the
    replica, or sums are scattered in the opposite order."""
    neighbours = part * layout.parts_of_replica
    return {"collective": layout.shards(unit) * part - neighbours, "replicas": neighbours - part}


def _updated_on_disk(layout: Layout, sizes: Sizes, unit: int) -> dict[Traffic, int]:
    shard, state = sizes.shard(layout, unit), (1 + MOMENTS) * sizes.master_bytes
    gradient = sizes.master_bytes if layout.keeps_gradients else 0
    copy = sizes.compute_bytes if sizes.has_own_copies else 0
    return {"disk_read": shard * (state + gradient), "disk_write": shard * (state + copy)}
