"""Finds ranks much slower than the median. Pure."""

from collections.abc import Collection, Mapping
from statistics import median_low
from typing import get_args

from pseudoreal_trainer.preflight.findings import Fault, Finding
from pseudoreal_trainer.preflight.pairs import Network

SLOW = 3.0
"""Ranks slower than this multiple of the median time are slow."""

_DOING = {"across": "to talk to another pod", "within": "to talk to another rank of its pod"}


def slow_ranks(findings: Collection[Finding]) -> list[Fault]:
    nodes = {finding.rank: finding.node for finding in findings}
    products = {f.rank: f.product_seconds for f in findings if f.product_seconds is not None}
    faults = _slower(products, nodes, "for a product")
    for network in get_args(Network):
        talks = {f.rank: seconds for f in findings if (seconds := f.seconds(network)) is not None}
        faults += _slower(talks, nodes, _DOING[network])
    return faults


def _slower(seconds: Mapping[int, float], nodes: Mapping[int, str], doing: str) -> list[Fault]:
    if not seconds:
        return []
    # median_low: of two ranks, the faster one is the reference.
    usual = median_low(seconds.values())
    return [
        Fault(
            ranks=[rank],
            text=f"rank {rank} on node {nodes[rank]} took {1000 * spent:.1f} ms {doing},"
            f" {spent / usual:.1f} times the median",
        )
        for rank, spent in sorted(seconds.items())
        if spent > SLOW * usual
    ]
