"""Logs of the pods with rank 0, read again and again."""

import time
from collections.abc import Callable, Iterator, Sequence

from pseudoreal_operator.observe.view import Pod

from pseudoreal.api import Api
from pseudoreal.errors import ClientError
from pseudoreal.observed_job import ObservedJob
from pseudoreal.pods import has_started, ranks_of

_LINES = 20_000
"""Maximum number of log lines per read."""
_OVERLAP_SECONDS = 10
"""Seconds of overlap between two reads of a log, because clocks differ."""


class FirstRankLogs:
    """Lines of rank 0 that were written since the read before; the newest ones come twice."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._read: dict[str, float] = {}
        """Pod name -> time (time.monotonic) of the last read of its log."""

    def read(
        self, job: ObservedJob, executions: Sequence[Sequence[Pod]], warn: Callable[[ClientError], None]
    ) -> Iterator[str]:
        """Yield the new lines, in the order of the executions; the log of an earlier execution is read once.

        `executions`: pods by execution. `warn` receives the failure of each log that cannot be read.
        """
        for pods in executions:
            first = next((pod for pod in pods if has_started(pod) and is_of_rank_0(job, pod)), None)
            if first is None or (first.name in self._read and pods is not executions[-1]):
                continue
            before, self._read[first.name] = self._read.get(first.name), time.monotonic()
            since = None if before is None else round(time.monotonic() - before) + _OVERLAP_SECONDS
            try:
                yield from self._api.log(job.namespace, first.name, tail=_LINES, since_seconds=since)
            except ClientError as error:
                if before is None:
                    del self._read[first.name]
                else:
                    self._read[first.name] = before
                warn(error)


def is_of_rank_0(job: ObservedJob, pod: Pod) -> bool:
    # Where a topology decided the ranks of an earlier execution, they are unknown: take the first pod.
    return 0 in (ranks_of(job, pod) or [pod.index])
