"""Results of the ranks, and the diagnosis from them: the faulty or slow ranks and networks. Pure."""

from collections.abc import Collection, Iterable, Mapping
from statistics import median_low
from typing import Any, get_args

import structlog
from pseudoreal_api.base import ApiModel
from pydantic import Field

from pseudoreal_trainer.preflight.pairs import Network


class Talk(ApiModel):
    """Result of one pairing of two ranks, as seen by one of them."""

    network: Network
    partner: int
    seconds: float | None = Field(None, description="Of a sum over both, the fastest of some. None: it failed.")
    error: str = ""


class Finding(ApiModel):
    """Results of one rank."""

    rank: int
    node: str
    product_seconds: float | None = Field(None, description="The fastest of some. None: there was none.")
    product_right: bool = False
    error: str = Field("", description="Why there was none.")
    talks: list[Talk] = Field([], description="Those that it came to, in their order.")

    def seconds(self, network: Network) -> float | None:
        """Return the seconds with the rank's fastest partner on the network; None if no pairing succeeded.

        The minimum is taken because the slow one of a pair may be the partner.
        """
        return min((t.seconds for t in self.talks if t.network == network and t.seconds is not None), default=None)


class Fault(ApiModel):
    ranks: list[int] = Field(description="One, or the two of a pair; none where it is no rank's own.")
    text: str


class Verdict(ApiModel):
    broken: list[Fault] = Field([])
    slow: list[Fault] = Field([])

    @property
    def suspect(self) -> int | None:
        """First rank at fault by itself; None if there is none."""
        return next((fault.ranks[0] for fault in self.broken if len(fault.ranks) == 1), None)


SLOW = 3.0
"""Ranks slower than this multiple of the median time are slow."""

_ACTIONS = {"across": "to talk to another pod", "within": "to talk to another rank of its pod"}


def slow_ranks(findings: Collection[Finding]) -> list[Fault]:
    nodes = {finding.rank: finding.node for finding in findings}
    products = {f.rank: f.product_seconds for f in findings if f.product_seconds is not None}
    faults = _slower(products, nodes, "for a product")
    for network in get_args(Network):
        talks = {f.rank: seconds for f in findings if (seconds := f.seconds(network)) is not None}
        faults += _slower(talks, nodes, _ACTIONS[network])
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


Nodes = Mapping[int, str]
"""Node name of each started rank."""
_Pair = frozenset[int]

_PARTNERS = {"across": "in other pods", "within": "in its pod"}
_PLACES = {"across": "of different pods", "within": "of one pod"}


def judge_start(world: int, nodes: Nodes, seconds: float) -> Verdict:
    """Return the verdict if some ranks did not even start."""
    missing = [rank for rank in range(world) if rank not in nodes]
    return Verdict(broken=[_silent(rank, nodes, seconds) for rank in missing])


def judge_silent_leader(nodes: Nodes, seconds: float) -> Verdict:
    """Return the verdict if rank 0, the judge, does not answer."""
    return Verdict(broken=[_silent(0, nodes, seconds)])


def judge(nodes: Nodes, findings: Collection[Finding], seconds: float) -> Verdict:
    """Return the verdict on all ranks, given the node of every rank and the findings arrived within `seconds`."""
    answered = {finding.rank for finding in findings}
    broken = [_silent(rank, nodes, seconds) for rank in sorted(nodes.keys() - answered)]
    broken += [fault for finding in findings for fault in _wrong(finding)]
    sound = _without(broken, findings)
    for network in get_args(Network):
        broken += _broken_networks(network, sound)
    return Verdict(broken=broken, slow=slow_ranks(_without(broken, sound)))


def _without(broken: Collection[Fault], findings: Collection[Finding]) -> list[Finding]:
    culprits = {fault.ranks[0] for fault in broken if len(fault.ranks) == 1}
    return [finding for finding in findings if finding.rank not in culprits]


def _silent(rank: int, nodes: Nodes, seconds: float) -> Fault:
    if rank in nodes:
        text = f"rank {rank} on node {nodes[rank]} began and did not answer within {seconds:.0f} s"
    else:
        text = f"rank {rank}, whose node is not known, did not begin within {seconds:.0f} s"
    return Fault(ranks=[rank], text=text)


def _wrong(finding: Finding) -> list[Fault]:
    if finding.product_seconds is None:
        said = f"computed no product ({finding.error or 'it never ended'})"
    elif not finding.product_right:
        said = "computed a wrong product"
    else:
        return []
    return [Fault(ranks=[finding.rank], text=f"rank {finding.rank} on node {finding.node} {said}")]


def _broken_networks(network: Network, findings: Collection[Finding]) -> list[Fault]:
    """Return the network faults between otherwise healthy ranks."""
    talks = {(f.rank, talk.partner): talk for f in findings for talk in f.talks if talk.network == network}
    # Count a pairing only if both sides reached it: a rank that an earlier partner delayed may never have joined, which
    # is not the fault of the rank that waited for it.
    met = {frozenset(pair) for pair in talks if pair[::-1] in talks}
    failed = {pair for pair in met if any(talk.seconds is None for talk in _both(talks, pair))}
    if len(failed) > 1 and failed == met:
        text = f"no two ranks {_PLACES[network]} could talk to each other{_reason(talks, min(failed, key=sorted))}"
        return [Fault(ranks=[], text=f"{text}; look at spec.network, and at what filters the traffic of the pods")]
    nodes = {finding.rank: finding.node for finding in findings}
    cut_off = [rank for rank in nodes if len(_partners(failed, rank)) > 1 and not _partners(met - failed, rank)]
    faults = [Fault(ranks=[rank], text=_lonely(rank, nodes, network, _partners(failed, rank))) for rank in cut_off]
    for pair in sorted(sorted(pair) for pair in failed if not pair & set(cut_off)):
        both = " and ".join(f"rank {rank} on node {nodes[rank]}" for rank in pair)
        text = f"{both} could not talk to each other{_reason(talks, frozenset(pair))}"
        faults.append(Fault(ranks=pair, text=text))
    return faults


def _both(talks: Mapping[tuple[int, int], Talk], pair: _Pair) -> list[Talk]:
    one, other = sorted(pair)
    return [talks[one, other], talks[other, one]]


def _partners(pairs: Collection[_Pair], rank: int) -> list[int]:
    return sorted(other for pair in pairs if rank in pair for other in pair - {rank})


def _lonely(rank: int, nodes: Nodes, network: Network, partners: list[int]) -> str:
    named = ", ".join(map(str, partners))
    return f"rank {rank} on node {nodes[rank]} could talk to none of its partners {_PARTNERS[network]}: ranks {named}"


def _reason(talks: Mapping[tuple[int, int], Talk], pair: _Pair) -> str:
    error = next((talk.error for talk in _both(talks, pair) if talk.error), "")
    return f" ({error})" if error else ""


_LISTED = 16
"""Number of ranks with logged times, slowest products first."""
_QUOTED = 4
"""Maximal number of faults in the sentence."""

_COLUMNS = ("product_ms", "across_ms", "within_ms")

log = structlog.get_logger()


def log_check(verdict: Verdict, findings: Collection[Finding]) -> None:
    times = [_times(finding) for finding in findings]
    usual = {column: _median(row[column] for row in times) for column in _COLUMNS}
    slowest = sorted(times, key=lambda row: -(row["product_ms"] or 0))[:_LISTED]
    log.info("preflight", ranks=len(times), broken=len(verdict.broken), median=usual, slowest=slowest)
    for fault in verdict.broken:
        log.warning("preflight_broken", ranks=fault.ranks, message=fault.text)
    for fault in verdict.slow:
        log.warning("preflight_slow", rank=fault.ranks[0], message=fault.text)


def _times(finding: Finding) -> dict[str, Any]:
    seconds = (finding.product_seconds, finding.seconds("across"), finding.seconds("within"))
    rounded = [None if value is None else round(1000 * value, 2) for value in seconds]
    return {"rank": finding.rank, "node": finding.node} | dict(zip(_COLUMNS, rounded, strict=True))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median_low(known) if known else None


def sentence(verdict: Verdict) -> str:
    """Return the sentence for a verdict with broken ranks: the faults, and the remedy."""
    found = "; ".join(fault.text for fault in verdict.broken[:_QUOTED])
    more = len(verdict.broken) - _QUOTED
    others = f"; and {more} more" if more > 0 else ""
    return (
        f"the check before the first step found: {found}{others}. Look at that node's accelerators and network, or keep"
        " it free of pods (kubectl cordon NODE); the next execution checks again"
    )
