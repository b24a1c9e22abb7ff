"""What a rule decides, and the claims that it makes most. Pure."""

from dataclasses import dataclass

from pseudoreal_api.status.status import PseudoRealJobStatus

from pseudoreal_operator.observe.stages import Stage
from pseudoreal_operator.status.conditions import ACCEPTED, NOT_SUSPENDED, Claim


@dataclass(frozen=True)
class Step:
    """What a rule decides. `children` is the stage whose children must be there; no other Job may run."""

    memory: PseudoRealJobStatus
    summary: str
    progressing: Claim
    children: Stage | None = None
    accepted: Claim = ACCEPTED
    suspended: Claim = NOT_SUSPENDED
    ended: Claim | None = None
    wake_after: float | None = 0.0
    """Seconds; 0 for at once, None for not before something changes."""


def progresses(reason: str, message: str) -> Claim:
    return Claim("Progressing", "True", reason, message)


def stands(reason: str, message: str) -> Claim:
    return Claim("Progressing", "False", reason, message)
