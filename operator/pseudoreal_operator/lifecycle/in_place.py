"""Restarts in place, which pods make on their own: counted before any rule decides. Pure.

Pods number their restarts. Each pod reports its newest number while it runs, and repeats it in its termination message,
so the operator sees one restart many times, and misses some. The status holds the highest counted number of the
execution; each number above it is counted once, as one restart of the job.
"""

from collections.abc import Iterator
from dataclasses import replace

from pseudoreal_api.status.status import Fault, PseudoRealJobStatus, RestartsInPlace
from pseudoreal_api.wire.messages import InPlace

from pseudoreal_operator import clock
from pseudoreal_operator.changes import status_with
from pseudoreal_operator.lifecycle.decisions import avoided_node_events, event, with_fault, with_retry
from pseudoreal_operator.lifecycle.membership import counted_restarts
from pseudoreal_operator.observe.report_store import QUIET_SECONDS
from pseudoreal_operator.observe.stages import StageKind
from pseudoreal_operator.observe.view import JobState, Observed, Pod, View
from pseudoreal_operator.status.events import Event, Reason

_Account = tuple[int, InPlace]
"""Worker index, and its pod's account of its newest restart in place."""


def count_restarts_in_place(view: View) -> tuple[Observed, tuple[Event, ...]]:
    """Return the observation with newly counted restarts in place in its status, and their events."""
    if not view.status.phases or view.stage.kind is not StageKind.TRAIN or view.job is None:
        return view.observed, ()
    accounts, known = _newest_accounts(view), counted_restarts(view)
    if not accounts or (number := accounts[0][1].restarts) <= known or not _is_complete(view, accounts):
        return view.observed, ()
    # A pod that lost no peer is the origin; among several, the lowest worker index is named.
    index, newest = min(accounts, key=lambda one: (one[1].peer_lost, one[0]))
    origin = None if newest.peer_lost else next((pod for pod in view.pods if pod.index == index), None)
    where = f"Pod {origin.name} (worker {index})" if origin else f"Worker {index}"
    message = f"{where}: {newest.message}".rstrip(".") + "."
    status = view.observed.status
    for each in range(known + 1, number + 1):
        # Accounts of earlier restarts were overwritten, so their origins are unknown.
        status = _with_restart(view, status, each, origin if each == number else None)
    phase, execution = view.execution.phase, view.execution.number
    newest_here = RestartsInPlace(phase=phase, execution=execution, restarts=number, message=message)
    status = status_with(status, restarts_in_place=newest_here)
    return replace(view.observed, status=status), tuple(_events(view, status, number, message))


def _newest_accounts(view: View) -> list[_Account]:
    """Return the workers' accounts of the newest restart in place, with the workers' indices."""
    last = [(pod.index, pod.termination.message) for pod in view.terminated_pods if pod.termination]
    said = [(index, message.in_place) for index, message in last if message]
    said += [(one.index, one.restarted) for one in view.reporting if one.report.in_place]
    known = [(index, in_place) for index, in_place in said if in_place]
    newest = max((in_place.restarts for _, in_place in known), default=0)
    return [(index, in_place) for index, in_place in known if in_place.restarts == newest]


def _is_complete(view: View, said: list[_Account]) -> bool:
    """Return whether no further account is expected: the worker where the restart began has reported, all workers have
    reported, the Job has ended, or QUIET_SECONDS have passed since a pod reported the restart."""
    if any(not in_place.peer_lost for _, in_place in said) or len({index for index, _ in said}) >= view.workers:
        return True
    has_ended = view.job is not None and view.job.state is not JobState.ACTIVE
    since = [last_report.first for last_report in view.reporting if last_report.restarted]
    return has_ended or any((view.now - first).total_seconds() > QUIET_SECONDS for first in since)


def _with_restart(view: View, status: PseudoRealJobStatus, number: int, origin: Pod | None) -> PseudoRealJobStatus:
    fault = Fault(
        execution=view.execution.number,
        time=clock.to_text(view.now),
        reason="PodFailed" if origin else "PeerLost",
        pod=origin.name if origin else None,
        node=(origin.node or None) if origin else None,
        restart_in_place=number,
    )
    return with_retry(with_fault(status, view.spec.restart, fault, view.now), counts=True)


def _events(view: View, status: PseudoRealJobStatus, number: int, message: str) -> Iterator[Event]:
    place = f"checkpoint {status.checkpoint.latest} or a newer one" if status.checkpoint else "the newest checkpoint"
    text = (
        f"{message} All ranks were restarted in the same pods, and continue from {place}. This is restart in place"
        f" {number} of execution {view.execution.number}, and restart {status.restarts} of the job."
    )
    yield event(view, Reason.RESTARTED_IN_PLACE, text, detail=str(number))
    yield from avoided_node_events(view, status)
