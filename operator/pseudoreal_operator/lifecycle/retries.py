"""How long to wait before another execution, and whether there may be one. Pure.

Each restart waits longer than the one before, unless a new checkpoint was committed between them: what goes on is
disturbed as little as possible, and what does not must not fill the cluster with its tries.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

from pseudoreal_api.spec.recovery import Restart
from pseudoreal_api.status.status import Fault, PseudoRealJobStatus, Retries

from pseudoreal_operator import clock

MAX_BACKOFF_SECONDS = 300
REMEMBERED_FAULTS = 100
_DOUBLINGS = 10
"""Beyond the longest wait already; more would only make a huge number."""


def retries(status: PseudoRealJobStatus) -> Retries:
    """Those since the newest checkpoint."""
    newest = status.checkpoint.latest if status.checkpoint else None
    known = status.retries
    return known if known and known.checkpoint == newest else Retries(restarts=0, checkpoint=newest)


def with_retry(status: PseudoRealJobStatus, *, counts: bool) -> PseudoRealJobStatus:
    """The status once another execution is announced."""
    known = retries(status)
    more = {"restarts": known.restarts + 1, "disruptions": known.disruptions + (not counts)}
    return status.model_copy(update={"retries": known.model_copy(update=more)})


def wait_seconds(status: PseudoRealJobStatus, restart: Restart) -> int:
    """Before the next restart. A wait of 0 grows as well: 0, 1, 3, 7, ..."""
    first, doublings = restart.backoff_seconds, min(_DOUBLINGS, retries(status).restarts)
    return min(max(MAX_BACKOFF_SECONDS, first), max(first << doublings, (1 << doublings) - 1))


def exhaustion(status: PseudoRealJobStatus, restart: Restart, now: datetime, *, counts: bool) -> str | None:
    """A sentence, when spec.restart allows no more restarts of that kind."""
    return _too_many_faults(status, restart, now) if counts else _too_many_disruptions(status, restart)


def _too_many_faults(status: PseudoRealJobStatus, restart: Restart, now: datetime) -> str | None:
    allowed, window = restart.max_restarts, restart.window_seconds
    used = len(recent(status.faults, window, now)) if window else status.restarts
    if used < allowed:
        return None
    within = f" within {window} s (spec.restart.windowSeconds)" if window else ""
    return f"That was after {used} restarts{within}, and spec.restart.maxRestarts allows {allowed}."


def _too_many_disruptions(status: PseudoRealJobStatus, restart: Restart) -> str | None:
    used = retries(status).disruptions
    if used < restart.max_disruptions:
        return None
    return (
        f"That was after {used} restarts that do not count, without a new checkpoint between them, and"
        f" spec.restart.maxDisruptions allows {restart.max_disruptions}."
    )


def with_fault(status: PseudoRealJobStatus, restart: Restart, fault: Fault, now: datetime) -> PseudoRealJobStatus:
    """The status with one that counts."""
    faults = [*recent(status.faults, restart.window_seconds, now), fault][-REMEMBERED_FAULTS:]
    update = {"attempt": status.attempt + 1, "restarts": status.restarts + 1, "faults": faults}
    return _learned(status.model_copy(update=update), restart)


def with_disruption(status: PseudoRealJobStatus, restart: Restart, fault: Fault, now: datetime) -> PseudoRealJobStatus:
    """The status with one that does not count, and that its node is to blame for."""
    disruptions = [*recent(status.disruptions, restart.window_seconds, now), fault][-REMEMBERED_FAULTS:]
    return _learned(status.model_copy(update={"disruptions": disruptions}), restart)


def recent(faults: Sequence[Fault], window: int | None, now: datetime) -> list[Fault]:
    """Those that spec.restart.windowSeconds still counts; without a window, all that are remembered."""
    if window is None:
        return list(faults)
    oldest = now - timedelta(seconds=window)
    return [fault for fault in faults if clock.from_text(fault.time) > oldest]


def _learned(status: PseudoRealJobStatus, restart: Restart) -> PseudoRealJobStatus:
    known = status.avoided_nodes
    new = [node for node in _bad_nodes(status, restart.avoid_nodes_after) if node not in known]
    return status.model_copy(update={"avoided_nodes": [*known, *new][-REMEMBERED_FAULTS:]})


def _bad_nodes(status: PseudoRealJobStatus, limit: int) -> Iterator[str]:
    counts = Counter(fault.node for fault in (*status.faults, *status.disruptions) if fault.node)
    return (node for node, count in counts.items() if count >= limit)
