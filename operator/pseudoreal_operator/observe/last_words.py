"""Termination messages of pods that were deleted as soon as they had ended, for instance pods of a suspended job. Pure.

The watch reports these pods once, and no list shows them any more. Their messages are kept in memory only: training
finds its checkpoints without them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from pseudoreal_operator.observe.board import JobKey
from pseudoreal_operator.observe.stages import Execution
from pseudoreal_operator.observe.view import Pod


@dataclass
class _Said:
    execution: Execution
    first: Pod | None = None
    """Pod of rank 0, which has the result."""
    newest: Pod | None = None
    """Pod with the newest checkpoint."""


class LastWords:
    """Termination messages of pods of each job's newest execution."""

    def __init__(self) -> None:
        self._said: dict[JobKey, _Said] = {}

    def hear(self, job: JobKey, pod: Pod) -> None:
        if pod.is_alive or pod.termination is None or pod.termination.message is None:
            return
        said = self._said.setdefault(job, _Said(pod.execution))
        if pod.execution.number < said.execution.number:
            return
        if pod.execution != said.execution:
            said = self._said[job] = _Said(pod.execution)
        if pod.index == 0:
            said.first = pod
        if said.newest is None or _step(pod) > _step(said.newest):
            said.newest = pod

    def of_job(self, job: JobKey, listed: Iterable[str]) -> tuple[Pod, ...]:
        """Return the deleted pods of a job whose messages are known. `listed`: names of the pods that still exist."""
        said, known = self._said.get(job), set(listed)
        pods = {pod.name: pod for pod in (said.first, said.newest) if pod} if said else {}
        return tuple(pod for name, pod in pods.items() if name not in known)

    def forget(self, job: JobKey) -> None:
        self._said.pop(job, None)


def _step(pod: Pod) -> int:
    message = pod.termination.message if pod.termination else None
    return message.step if message and message.checkpoint else -1
