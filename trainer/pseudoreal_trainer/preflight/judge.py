"""Diagnosis: from the findings of the ranks to the faulty ranks or networks. Pure."""

from collections.abc import Collection, Mapping
from typing import get_args

from pseudoreal_trainer.preflight.findings import Fault, Finding, Talk, Verdict
from pseudoreal_trainer.preflight.pairs import Network
from pseudoreal_trainer.preflight.slowness import slow_ranks

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
