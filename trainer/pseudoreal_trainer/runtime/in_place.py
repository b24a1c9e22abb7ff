"""Restarts of ranks in place after one of them has died: in all pods of an execution, which live on.

Each pod decides by itself, by a rule that is the same in all pods. If their decisions differ, for instance because a
node is lost, the rendezvous fails. Then each pod ends, as it would have ended without a restart, and the operator
starts an execution with new pods. With spare pods, the operator tells which spare takes the place of the lost pod, and
the remaining pods meet with that spare.

No rank from before a restart lives when a rank starts after it: a pod joins the rendezvous only when all of its own
ranks have ended, and no rank starts before all pods have joined. A pod whose place was taken over may live on unseen.
Its ranks can complete no step without the others, and the checkpoints' fence rejects a commit that the pod may have
left to do.
"""

import time

import structlog
from pseudoreal_api.wire.messages import IN_PLACE_CHARACTERS, InPlace, TerminationMessage

from pseudoreal_trainer.runtime.outcome import ended_badly
from pseudoreal_trainer.runtime.place import Place, first_place, place_in
from pseudoreal_trainer.runtime.ranks import Ending, Launch, run_ranks
from pseudoreal_trainer.runtime.torchrun import prepare_torchrun

_LOOK_SECONDS = 0.2
"""Seconds between two looks for a message of the operator to a spare pod."""

log = structlog.get_logger()


def run_in_place(launch: Launch) -> TerminationMessage:
    """Run the pod's ranks, and restart them in place as often as the pod may, or is told to. Return its termination
    message."""
    first = first_place(launch.config, launch.index)
    if first is None:
        return _as_spare(launch)
    return _as_worker(launch, first) or ended_badly("Yielded", launch.config, "another pod has its place")


def _as_spare(launch: Launch) -> TerminationMessage:
    """Wait for a place and run its ranks. If the others did not come, wait again: pods that wait for this pod are told
    of another rendezvous."""
    prepare_torchrun()
    log.info("spare_pod_waits", index=launch.index)
    after = 0
    while (place := _awaited(launch, after)) is not None:
        if (message := _as_worker(launch, place)) is not None:
            return message
        after = place.restart
    return ended_badly("Yielded", launch.config, "a spare pod that was not needed")


def _as_worker(launch: Launch, place: Place) -> TerminationMessage | None:
    """Run the ranks at a place, and at the places that follow it. Return the pod's termination message; None: its first
    ranks have not started, as the pods have not met."""
    following: Place | None = place
    last: TerminationMessage | None = None
    while following is not None:
        place, why = following, _announced(launch, following, last)
        ended = run_ranks(launch, place)
        if ended is not None:
            last = ended.message.model_copy(update={"in_place": why})
        if ended is not None and not ended.may_restart:
            break
        following = _next(launch, place, ended)
    return last


def _next(launch: Launch, place: Place, ended: Ending | None) -> Place | None:
    """Return the place at which the pod continues; None: the pod ends."""
    membership = None if launch.stop.asked else launch.folder.membership()
    if membership is not None and membership.restart > place.restart:
        return place_in(membership, launch.config, launch.index)
    if ended is None:
        log.warning("pods_have_not_met", restart=place.restart)
        return None
    return place.again()


def _announced(launch: Launch, place: Place, last: TerminationMessage | None) -> InPlace | None:
    """Record and return why the ranks restart in place; None on the first start."""
    if place.restart == 0:
        return None
    why = _reason(place, last)
    log.warning("ranks_restart_in_place", restart=place.restart, worker=place.worker, reason=why.message)
    launch.folder.make_room(why)
    return why


def _reason(place: Place, last: TerminationMessage | None) -> InPlace:
    if last is None:
        return InPlace(restarts=place.restart, peer_lost=True, message=f"began as worker {place.worker}")
    # Ranks that yield end together with a peer that was asked to stop.
    peer_lost = last.peer_lost or last.outcome == "Yielded"
    return InPlace(restarts=place.restart, peer_lost=peer_lost, message=last.message[:IN_PLACE_CHARACTERS])


def _awaited(launch: Launch, after: int) -> Place | None:
    """Wait for the place that the operator gives to a spare pod, with a restart after number `after`. Return None if
    the pod was asked to stop."""
    while not launch.stop.asked:
        membership = launch.folder.membership()
        is_new = membership is not None and membership.restart > after
        if membership and is_new and (place := place_in(membership, launch.config, launch.index)):
            return place
        time.sleep(_LOOK_SECONDS)
    return None
