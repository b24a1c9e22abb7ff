"""The ranks of one pod: where one of them is gone, the others can neither train nor save, and may wait for ever."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import structlog

from pseudoreal_trainer.heartbeat.record import read_heartbeat
from pseudoreal_trainer.heartbeat.side_thread import Clock
from pseudoreal_trainer.pod.heartbeats import process_state
from pseudoreal_trainer.pod.outcome import has_failed, read_outcome
from pseudoreal_trainer.pod.pod_folder import PodFolder

LAST_SECONDS = 2.0
"""Seconds that the others have for their outcomes."""
_DEAD = ("Z", "X")

log = structlog.get_logger()


class Partners:
    """The ranks of a pod. `ended` are the local ranks that were killed here: what became of them was not their
    fault."""

    def __init__(self, folder: PodFolder, clock: Clock = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._gone_since: float | None = None
        self.ended: set[int] = set()

    def look(self) -> None:
        """Looks at the ranks, and kills the others LAST_SECONDS after one was seen to be gone. To be called again and
        again."""
        now = self._clock()
        if self._gone_since is None and any(self._is_gone(*rank) for rank in self._ranks()):
            self._gone_since = now
        if self._gone_since is not None and now - self._gone_since >= LAST_SECONDS:
            self.end_all("another rank of this pod is gone")

    def are_gone(self) -> bool:
        """Whether all ranks are dead."""
        return all(process_state(pid) in _DEAD for _, pid in self._ranks())

    def _is_gone(self, local_rank: int, pid: int) -> bool:
        """Whether the rank is dead and has not ended well: it was killed, or has failed."""
        if process_state(pid) not in _DEAD:
            return False
        outcome = read_outcome(self._folder.path, local_rank)
        return outcome is None or has_failed(outcome)

    def end_all(self, why: str) -> None:
        """Kills the ranks that are not dead."""
        for local_rank, pid in self._ranks():
            if local_rank not in self.ended and process_state(pid) not in _DEAD:
                self.ended.add(local_rank)
                log.warning("rank_ended", local_rank=local_rank, why=why)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _ranks(self) -> Iterator[tuple[int, int]]:
        """Local rank and process of each rank that has begun."""
        for path in self._folder.heartbeats():
            if (record := read_heartbeat(path)) is not None:
                yield int(path.stem), record.pid
