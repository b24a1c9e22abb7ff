"""Restart of all ranks in place after a rank has died; the pods of the execution keep running.

Once its own ranks have ended, each pod decides by itself whether to restart them. All pods decide by the same rule. The
ranks of a pod may run on, unaware of the death. Such a pod learns of the restart from the answer to its next report,
and then kills its ranks. If the decisions of the pods differ, for instance because a node is lost, the rendezvous
fails: each pod ends as without a restart, and the operator starts an execution with new pods. With spare pods, the
operator decides which spare replaces the lost pod, and announces the spare in the answers to reports. The remaining
pods then have a rendezvous with the spare.

When the first rank starts after a restart, all ranks from before are dead: a pod joins the rendezvous only after all of
its own ranks have ended. No rank starts before all pods have joined. A replaced pod may live on unseen. Its ranks can
complete no step without the others, and the checkpoints' fence rejects its pending commits.
"""

import time
from dataclasses import replace

import structlog
from pseudoreal_api.wire.messages import IN_PLACE_CHARACTERS, InPlace, TerminationMessage

from pseudoreal_trainer.runtime.history import ranks_of, record_restart_in_place
from pseudoreal_trainer.runtime.ranks import Launch, RanksResult, prepare_torchrun, run_ranks
from pseudoreal_trainer.runtime.rendezvous.identity import RendezvousIdentity, identity_in, initial_identity
from pseudoreal_trainer.runtime.termination import termination_message

_LOOK_SECONDS = 0.2
"""Seconds between two checks of a spare pod for a message from the operator."""

log = structlog.get_logger()


def run_in_place(launch: Launch) -> TerminationMessage:
    """Run the pod's ranks, restart them in place if the pod's own rule or the operator decides so, and return the pod's
    termination message."""
    first = initial_identity(launch.config, launch.index)
    if first is None:
        return _run_as_spare(launch)
    if (message := _run_as_worker(launch, first)) is not None:
        return message
    why = "it was asked to stop before its ranks started" if launch.stop.asked else "another pod has its place"
    return termination_message("Yielded", launch.config, why)


def _run_as_spare(launch: Launch) -> TerminationMessage:
    """Wait until the operator assigns a worker index to the pod, and run the ranks.

    If the other pods do not come to the rendezvous, wait again: the operator announces another rendezvous to all pods.
    """
    prepare_torchrun()
    log.info("spare_pod_waits", index=launch.index)
    after = 0
    while (identity := _wait_for_identity(launch, after)) is not None:
        if (message := _run_as_worker(launch, identity)) is not None:
            return message
        after = identity.restart
    return termination_message("Yielded", launch.config, "a spare pod that was not needed")


def _run_as_worker(launch: Launch, identity: RendezvousIdentity) -> TerminationMessage | None:
    """Run the ranks, and restart them in place while the result permits a restart and `_next_identity` returns an
    identity.

    Return the pod's termination message; None: no ranks have started, because the pods did not meet.
    """
    following: RendezvousIdentity | None = identity
    last: TerminationMessage | None = None
    while following is not None:
        identity, why = replace(following, is_first=last is None), _record_restart(launch, following, last)
        ended = run_ranks(launch, identity)
        if ended is not None:
            last = ended.message.model_copy(update={"in_place": why})
        if ended is not None and not ended.may_restart:
            break
        following = _next_identity(launch, identity, ended)
    return last


def _next_identity(
    launch: Launch, identity: RendezvousIdentity, ended: RanksResult | None
) -> RendezvousIdentity | None:
    """Return the identity with which the pod restarts its ranks; None: the pod ends.

    An assignment announced by the operator comes before the pod's own decision.
    """
    membership = None if launch.stop.asked else launch.folder.membership()
    if membership is not None and membership.restart > identity.restart:
        return identity_in(membership, launch.config, launch.index)
    if ended is None:
        log.warning("pods_have_not_met", restart=identity.restart)
        return None
    return identity.after_own_restart()


def _record_restart(launch: Launch, identity: RendezvousIdentity, last: TerminationMessage | None) -> InPlace | None:
    """Remove the files of the ended ranks; record and return why the ranks restart in place. None on the first
    start."""
    if identity.restart == 0:
        return None
    why = _reason(identity, last)
    log.warning("ranks_restart_in_place", restart=identity.restart, worker=identity.worker, reason=why.message)
    if last is not None:
        record_restart_in_place(launch.config, why, ranks_of(launch.folder))
    launch.folder.remove_rank_files(why)
    return why


def _reason(identity: RendezvousIdentity, last: TerminationMessage | None) -> InPlace:
    if last is None:
        # Without ranks, it has lost no peer. From `peer_lost` the operator concludes that all pods have met before.
        return InPlace(restarts=identity.restart, peer_lost=False, message=f"began as worker {identity.worker}")
    # Here, Yielded means that another pod was asked to stop: the ranks lose that pod.
    peer_lost = last.peer_lost or last.outcome == "Yielded"
    return InPlace(restarts=identity.restart, peer_lost=peer_lost, message=last.message[:IN_PLACE_CHARACTERS])


def _wait_for_identity(launch: Launch, after: int) -> RendezvousIdentity | None:
    """Wait until the operator assigns a worker to this spare pod, with a restart later than number `after`.

    Return None if the pod was asked to stop.
    """
    while not launch.stop.asked:
        membership = launch.folder.membership()
        is_new = membership is not None and membership.restart > after
        if membership and is_new and (identity := identity_in(membership, launch.config, launch.index)):
            return identity
        time.sleep(_LOOK_SECONDS)
    return None
