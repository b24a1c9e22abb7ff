"""Termination messages of pods that were deleted as soon as they had ended, for instance pods of a suspended job. Pure.

The watch reports these pods once, and no list shows them any more. Their messages are kept in memory only: training
finds its checkpoints without them.
"""

from collections.abc import Set
from dataclasses import dataclass

from pseudoreal_operator.observe.report_store import JobKey
from pseudoreal_operator.observe.stages import Execution
from pseudoreal_operator.observe.view import Pod


@dataclass
class _Newest:
    execution: Execution
    first: Pod | None = None
    """Pod of worker 0, which has the result; None: not known."""
    newest: Pod | None = None
    """Pod with the newest checkpoint in its message; None: not known."""


class TerminationMessages:
    """Termination messages of pods of each job's newest execution."""

    def __init__(self) -> None:
        self._messages: dict[JobKey, _Newest] = {}

    def store(self, job: JobKey, pod: Pod) -> None:
        if pod.is_alive or pod.termination is None or pod.termination.message is None:
            return
        known = self._messages.setdefault(job, _Newest(pod.execution))
        if pod.execution.number < known.execution.number:
            return
        if pod.execution != known.execution:
            known = self._messages[job] = _Newest(pod.execution)
        if pod.index == 0:
            known.first = pod
        if known.newest is None or _step(pod) > _step(known.newest):
            known.newest = pod

    def of_job(self, job: JobKey, existing: Set[str]) -> tuple[Pod, ...]:
        """Return the deleted pods of a job with known termination messages. `existing`: names of the pods that still
        exist."""
        known = self._messages.get(job)
        pods = {pod.name: pod for pod in (known.first, known.newest) if pod} if known else {}
        return tuple(pod for name, pod in pods.items() if name not in existing)

    def forget(self, job: JobKey) -> None:
        self._messages.pop(job, None)


def _step(pod: Pod) -> int:
    message = pod.termination.message if pod.termination else None
    return message.step if message and message.checkpoint else -1
