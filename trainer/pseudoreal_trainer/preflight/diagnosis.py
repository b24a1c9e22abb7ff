"""Results of the ranks, and the diagnosis: faulty or slow ranks and networks. Pure, except for `log_check`."""

from collections.abc import Collection, Iterable, Mapping
from statistics import median_low
from typing import Any, get_args

import structlog
from pseudoreal_api.base import ApiModel
from pydantic import Field

from pseudoreal_trainer.preflight.pairs import Network


class PairResult(ApiModel):
    """Result of a pairing of two ranks, as measured by one of the two."""

    network: Network
    partner: int
    seconds: float | None = Field(None, description="Seconds of the fastest all-reduce of both ranks. None: it failed.")
    error: str = ""


class RankResult(ApiModel):
    """Results of one rank."""

    rank: int
    node: str
    product_seconds: float | None = Field(None, description="Seconds of the fastest product. None: there was none.")
    product_right: bool = False
    error: str = Field("", description="Reason why there was no product.")
    pair_results: list[PairResult] = Field([], description="Results of the pairings that the rank reached, in order.")

    def seconds(self, network: Network) -> float | None:
        """Return the seconds with the rank's fastest partner on the network; None if no pairing succeeded.

        The minimum is used because in a slow pair the partner may be at fault.
        """
        return min(
            (t.seconds for t in self.pair_results if t.network == network and t.seconds is not None), default=None
        )


class Fault(ApiModel):
    ranks: list[int] = Field(description="Faulty rank, or both ranks of a pair; empty for a fault of the network.")
    text: str


class Diagnosis(ApiModel):
    broken: list[Fault] = Field([])
    slow: list[Fault] = Field([])

    @property
    def suspect(self) -> int | None:
        """First broken rank that alone is at fault; None if there is none."""
        return next((fault.ranks[0] for fault in self.broken if len(fault.ranks) == 1), None)


SLOW = 3.0
"""A rank counts as slow if it takes more than this multiple of the median time."""

_ACTIONS = {"across": "to talk to another pod", "within": "to talk to another rank of its pod"}


def slow_ranks(results: Collection[RankResult]) -> list[Fault]:
    nodes = {result.rank: result.node for result in results}
    products = {f.rank: f.product_seconds for f in results if f.product_seconds is not None}
    faults = _slow_faults(products, nodes, "for a product")
    for network in get_args(Network):
        pair_results = {f.rank: seconds for f in results if (seconds := f.seconds(network)) is not None}
        faults += _slow_faults(pair_results, nodes, _ACTIONS[network])
    return faults


def _slow_faults(seconds: Mapping[int, float], nodes: Mapping[int, str], doing: str) -> list[Fault]:
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


Nodes = Mapping[int, str]
"""Rank -> node name, for started ranks."""
_Pair = frozenset[int]

_PARTNERS = {"across": "in other pods", "within": "in its pod"}
_PLACES = {"across": "of different pods", "within": "of one pod"}


def diagnose_start(world: int, nodes: Nodes, seconds: float) -> Diagnosis:
    """Return the diagnosis of the start: a fault for each rank that did not start within `seconds`."""
    missing = [rank for rank in range(world) if rank not in nodes]
    return Diagnosis(broken=[_silent_fault(rank, nodes, seconds) for rank in missing])


def diagnose_silent_leader(nodes: Nodes, seconds: float) -> Diagnosis:
    """Return the diagnosis of a rank to which rank 0 has sent no diagnosis for `seconds`: rank 0 is at fault."""
    return Diagnosis(broken=[_silent_fault(0, nodes, seconds)])


def diagnose(nodes: Nodes, results: Collection[RankResult], seconds: float) -> Diagnosis:
    """Return the diagnosis on all ranks. `nodes`: nodes of all ranks. `results`: results that arrived within
    `seconds`."""
    answered = {result.rank for result in results}
    broken = [_silent_fault(rank, nodes, seconds) for rank in sorted(nodes.keys() - answered)]
    broken += [fault for result in results for fault in _product_faults(result)]
    sound = _healthy(broken, results)
    for network in get_args(Network):
        broken += _broken_networks(network, sound)
    return Diagnosis(broken=broken, slow=slow_ranks(_healthy(broken, sound)))


def _healthy(broken: Collection[Fault], results: Collection[RankResult]) -> list[RankResult]:
    culprits = {fault.ranks[0] for fault in broken if len(fault.ranks) == 1}
    return [result for result in results if result.rank not in culprits]


def _silent_fault(rank: int, nodes: Nodes, seconds: float) -> Fault:
    if rank in nodes:
        text = f"rank {rank} on node {nodes[rank]} began and did not answer within {seconds:.0f} s"
    else:
        text = f"rank {rank}, whose node is not known, did not begin within {seconds:.0f} s"
    return Fault(ranks=[rank], text=text)


def _product_faults(result: RankResult) -> list[Fault]:
    if result.product_seconds is None:
        said = f"computed no product ({result.error or 'it never ended'})"
    elif not result.product_right:
        said = "computed a wrong product"
    else:
        return []
    return [Fault(ranks=[result.rank], text=f"rank {result.rank} on node {result.node} {said}")]


def _broken_networks(network: Network, results: Collection[RankResult]) -> list[Fault]:
    """Return the network faults between otherwise healthy ranks."""
    pair_results = {
        (f.rank, pair_result.partner): pair_result
        for f in results
        for pair_result in f.pair_results
        if pair_result.network == network
    }
    # Count a pairing only if both ranks reached it. A rank delayed by an earlier partner may never have joined; the
    # rank that waited for it is then not at fault.
    met = {frozenset(pair) for pair in pair_results if pair[::-1] in pair_results}
    failed = {pair for pair in met if any(side.seconds is None for side in _both_sides(pair_results, pair))}
    if len(failed) > 1 and failed == met:
        reason = _reason(pair_results, min(failed, key=sorted))
        text = f"no two ranks {_PLACES[network]} could talk to each other{reason}"
        return [Fault(ranks=[], text=f"{text}; look at spec.network, and at what filters the traffic of the pods")]
    nodes = {result.rank: result.node for result in results}
    cut_off = [rank for rank in nodes if len(_partners_of(failed, rank)) > 1 and not _partners_of(met - failed, rank)]
    faults = [
        Fault(ranks=[rank], text=_cut_off_sentence(rank, nodes, network, _partners_of(failed, rank)))
        for rank in cut_off
    ]
    for pair in sorted(sorted(pair) for pair in failed if not pair & set(cut_off)):
        both = " and ".join(f"rank {rank} on node {nodes[rank]}" for rank in pair)
        text = f"{both} could not talk to each other{_reason(pair_results, frozenset(pair))}"
        faults.append(Fault(ranks=pair, text=text))
    return faults


def _both_sides(pair_results: Mapping[tuple[int, int], PairResult], pair: _Pair) -> list[PairResult]:
    one, other = sorted(pair)
    return [pair_results[one, other], pair_results[other, one]]


def _partners_of(pairs: Collection[_Pair], rank: int) -> list[int]:
    return sorted(other for pair in pairs if rank in pair for other in pair - {rank})


def _cut_off_sentence(rank: int, nodes: Nodes, network: Network, partners: list[int]) -> str:
    named = ", ".join(map(str, partners))
    return f"rank {rank} on node {nodes[rank]} could talk to none of its partners {_PARTNERS[network]}: ranks {named}"


def _reason(pair_results: Mapping[tuple[int, int], PairResult], pair: _Pair) -> str:
    error = next((side.error for side in _both_sides(pair_results, pair) if side.error), "")
    return f" ({error})" if error else ""


_LISTED = 16
"""Maximum number of ranks with logged times, slowest products first."""
_QUOTED = 4
"""Maximum number of faults named in the sentence."""

_COLUMNS = ("product_ms", "across_ms", "within_ms")

log = structlog.get_logger()


def log_check(diagnosis: Diagnosis, results: Collection[RankResult]) -> None:
    times = [_times(result) for result in results]
    usual = {column: _median(row[column] for row in times) for column in _COLUMNS}
    slowest = sorted(times, key=lambda row: -(row["product_ms"] or 0))[:_LISTED]
    log.info("preflight", ranks=len(times), broken=len(diagnosis.broken), median=usual, slowest=slowest)
    for fault in diagnosis.broken:
        log.warning("preflight_broken", ranks=fault.ranks, message=fault.text)
    for fault in diagnosis.slow:
        log.warning("preflight_slow", rank=fault.ranks[0], message=fault.text)


def _times(result: RankResult) -> dict[str, Any]:
    seconds = (result.product_seconds, result.seconds("across"), result.seconds("within"))
    rounded = [None if value is None else round(1000 * value, 2) for value in seconds]
    return {"rank": result.rank, "node": result.node} | dict(zip(_COLUMNS, rounded, strict=True))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median_low(known) if known else None


def sentence_of(diagnosis: Diagnosis) -> str:
    """Return the sentence for a diagnosis with faults: the faults, and the remedy."""
    found = "; ".join(fault.text for fault in diagnosis.broken[:_QUOTED])
    more = len(diagnosis.broken) - _QUOTED
    others = f"; and {more} more" if more > 0 else ""
    return (
        f"the check before the first step found: {found}{others}. Look at that node's accelerators and network, or keep"
        " it free of pods (kubectl cordon NODE); the next execution checks again"
    )
