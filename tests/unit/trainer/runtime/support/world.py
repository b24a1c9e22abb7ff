"""Ranks that train together on this machine, observed through their heartbeats, as their pods observe them."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.wire.reports import RankReport
from pseudoreal_trainer.runtime.heartbeat import HeartbeatRecord, read_heartbeat
from pseudoreal_trainer.runtime.pod_folder import PodFolder
from pseudoreal_trainer.runtime.reports import rank_heartbeats

from tests.support.forked import start_rank
from tests.support.patience import wait_for
from tests.support.ports import free_port
from tests.support.processes import LIMIT_SECONDS, Forked
from tests.unit.trainer.runtime.support import faulty_worker


@dataclass
class World:
    """Ranks without pod programs, each with a pod folder of its own."""

    folder: Path
    processes: list[Forked] = field(default_factory=list)

    def heartbeats(self) -> list[RankReport]:
        found = (sign for rank in range(len(self.processes)) for sign in rank_heartbeats(self.pod_folder(rank)))
        return sorted(found, key=lambda sign: sign.rank)

    def wait_for(self, condition: Callable[[list[RankReport]], object]) -> list[RankReport]:
        """Return the first heartbeats of all ranks for which the condition holds."""

        def look() -> list[RankReport] | None:
            found = self.heartbeats()
            assert all(process.poll() is None for process in self.processes), "all ranks are alive"
            return found if len(found) == len(self.processes) and condition(found) else None

        return wait_for("it", look, lambda: f"{self.heartbeats()}\n{self.stacks()}", LIMIT_SECONDS, pause=0.02)

    def makes_steps(self, count: int) -> None:
        begin = max((beat.step for beat in self.heartbeats()), default=0)
        self.wait_for(lambda beats: min(beat.step for beat in beats) >= begin + count)

    def record(self, rank: int) -> HeartbeatRecord:
        found = read_heartbeat(self.pod_folder(rank).heartbeat(0))
        assert found is not None
        return found

    def pod_folder(self, rank: int) -> PodFolder:
        return PodFolder(self.folder / f"pod-{rank}")

    @contextmanager
    def fault(self, kind: str, rank: int) -> Iterator[None]:
        file = self.folder / f"{kind}-{rank}"
        file.touch()
        try:
            yield
        finally:
            file.unlink(missing_ok=True)

    @contextmanager
    def stopped(self, rank: int) -> Iterator[None]:
        pid = self.record(rank).pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def stacks(self) -> str:
        """Return the stacks of all threads. Ends the ranks: each writes its stacks when it aborts."""
        for beat in self.heartbeats():
            with suppress(ProcessLookupError):
                os.kill(self.record(beat.rank).pid, signal.SIGABRT)
        files = [self.pod_folder(rank).path / "0.crash" for rank in range(len(self.processes))]
        until = time.monotonic() + 5.0
        while time.monotonic() < until and not all(file.exists() and file.stat().st_size for file in files):
            time.sleep(0.1)
        return "\n".join(f"rank {rank}:\n{_read(file)}" for rank, file in enumerate(files))


def _read(file: Path) -> str:
    return (file.read_text() if file.exists() else "") or "it does not answer"


@contextmanager
def world(config: PhaseConfig, folder: Path) -> Iterator[World]:
    """Train until the context ends, or the phase."""
    found, file, port = World(folder), folder / "config.json", free_port()
    file.write_text(config.to_json())
    prepare = partial(faulty_worker.install, folder)
    try:
        for rank in range(config.workers):
            own = found.pod_folder(rank).path
            found.processes.append(start_rank(file, rank, config.workers, port, own, prepare))
        yield found
    finally:
        for process in found.processes:
            process.kill()
