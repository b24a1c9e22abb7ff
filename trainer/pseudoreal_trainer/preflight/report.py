"""Result of the preflight check in the log and in the pod's message."""

from collections.abc import Collection, Iterable
from statistics import median_low
from typing import Any

import structlog

from pseudoreal_trainer.preflight.findings import Finding, Verdict

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
