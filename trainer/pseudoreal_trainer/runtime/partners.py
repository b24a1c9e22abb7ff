"""Watches the ranks of a pod: after one is gone, the others can neither train nor save, and may wait forever."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import structlog

from pseudoreal_trainer.runtime.heartbeats import process_state
from pseudoreal_trainer.runtime.outcome import has_failed, read_outcome
from pseudoreal_trainer.runtime.pod_folder import PodFolder
from pseudoreal_trainer.runtime.record import read_heartbeat
from pseudoreal_trainer.runtime.side_thread import Clock

LAST_SECONDS = 2.0
"""Seconds for the remaining ranks to write their outcomes."""
_DEAD = ("Z", "X")

log = structlog.get_logger()


class Partners:
    """The local ranks of a pod, found through their heartbeat files.

    `ended` are the local ranks killed by this object: their end is not their fault.
    """

    def __init__(self, folder: PodFolder, clock: Clock = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._gone_since: float | None = None
        self.ended: set[int] = set()

    def look(self) -> None:
        """Check the ranks, and kill the remaining ones `LAST_SECONDS` after one was found gone. Call repeatedly."""
        now = self._clock()
        if self._gone_since is None and any(self._is_gone(*rank) for rank in self._ranks()):
            self._gone_since = now
        if self._gone_since is not None and now - self._gone_since >= LAST_SECONDS:
            self.end_all("another rank of this pod is gone")

    def are_gone(self) -> bool:
        """Return whether all ranks are dead."""
        return all(process_state(pid) in _DEAD for _, pid in self._ranks())

    def _is_gone(self, local_rank: int, pid: int) -> bool:
        """Return whether the rank is dead after a kill or a failure."""
        if process_state(pid) not in _DEAD:
            return False
        outcome = read_outcome(self._folder.path, local_rank)
        return outcome is None or has_failed(outcome)

    def end_all(self, why: str) -> None:
        """Kill the surviving ranks."""
        for local_rank, pid in self._ranks():
            if local_rank not in self.ended and process_state(pid) not in _DEAD:
                self.ended.add(local_rank)
                log.warning("rank_ended", local_rank=local_rank, why=why)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _ranks(self) -> Iterator[tuple[int, int]]:
        """Yield local rank and process id of each started rank."""
        for path in self._folder.heartbeats():
            if (record := read_heartbeat(path)) is not None:
                yield int(path.stem), record.pid
