"""Limit on restarts in place, which the pods of an execution make without asking the operator. Pure."""

from pseudoreal_api.spec.recovery import Restart
from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_api.wire.messages import ExitCode

from pseudoreal_operator.failures.classify import matches_rule
from pseudoreal_operator.observe.stages import Execution, StageKind
from pseudoreal_operator.observe.view import Pod, PodPhase, Termination

_KILLED = Pod(
    name="killed",
    execution=Execution("any", StageKind.TRAIN, 1),
    index=0,
    phase=PodPhase.FAILED,
    termination=Termination(exit_code=ExitCode.FAILED, reason="Error", text="", message=None),
)
"""A pod as Kubernetes shows it after one of its ranks was killed."""


def allowed_restarts_in_place(restart: Restart, status: PseudoRealJobStatus) -> int:
    """Return how many restarts in place an execution may have: at most as many as may still be counted, and none if
    a rule of the job decides what follows the end of such a pod. The used restarts may include faults that are too
    old to count."""
    if any(matches_rule(_KILLED, rule) for rule in restart.rules):
        return 0
    used = len(status.faults) if restart.window_seconds else status.restarts
    return max(0, min(restart.in_place, restart.max_restarts - used))
