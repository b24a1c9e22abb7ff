"""Ranks are restarted in place when one of them has died: in all pods of an execution, which live on.

Each pod decides by itself, by a rule that is the same in all. Where they do not all come to the same, for instance as a
node is lost, they do not meet; then each of them ends, as it would have ended without a restart, and the operator makes
an execution with new pods.

No rank from before a restart lives when one begins after it: a pod comes to the meeting only when all of its own have
ended, and no rank begins before all pods have met. So none from before can commit a checkpoint.
"""

import structlog
from pseudoreal_api.wire.messages import IN_PLACE_CHARACTERS, InPlace, TerminationMessage

from pseudoreal_trainer.launch.ranks import Ending, Launch, run_ranks

log = structlog.get_logger()


def run_in_place(launch: Launch) -> TerminationMessage:
    """Runs the ranks of the pod, and restarts them in place as often as the configuration allows: the pod's last
    word."""
    ended, begun = run_ranks(launch, 0), None
    assert ended is not None, "the first meeting has no time limit"
    for restarts in range(1, launch.config.in_place + 1):
        if not ended.may_restart:
            break
        why = _reason(ended, restarts)
        log.warning("ranks_restart_in_place", restart=restarts, of=launch.config.in_place, reason=why.message)
        launch.folder.make_room(why)
        following = run_ranks(launch, restarts)
        if following is None:
            log.warning("pods_have_not_met", restart=restarts)
            break
        ended, begun = following, why
    return ended.message.model_copy(update={"in_place": begun})


def _reason(ended: Ending, restarts: int) -> InPlace:
    message = ended.message
    return InPlace(restarts=restarts, peer_lost=message.peer_lost, message=message.message[:IN_PLACE_CHARACTERS])
