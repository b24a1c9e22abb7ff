"""Content of a pod's report: heartbeats of its ranks, training progress, newest checkpoint."""

import re
import time
from pathlib import Path

from pseudoreal_api.wire.reports import PodReport, RankReport

from pseudoreal_trainer.runtime.pod_folder import PodFolder
from pseudoreal_trainer.runtime.record import HeartbeatRecord, read_heartbeat

_PROCESSES = Path("/proc")
_GONE = "X"


def pod_report(folder: PodFolder) -> PodReport:
    # Read before the ranks: the ranks then belong to this restart or a later one, never to an earlier one.
    in_place = folder.in_place()
    return PodReport(
        ranks=rank_heartbeats(folder),
        progress=folder.progress(),
        checkpoint=folder.checkpoint(),
        layout=folder.layout(),
        in_place=in_place,
    )


def rank_heartbeats(folder: PodFolder) -> list[RankReport]:
    """Return the newest heartbeat of each started rank."""
    records = [record for record in map(read_heartbeat, folder.heartbeats()) if record is not None]
    return [rank_heartbeat(record, time.monotonic(), process_state(record.pid)) for record in records]


def rank_heartbeat(record: HeartbeatRecord, now: float, process: str) -> RankReport:
    """Return the report of one rank. Pure.

    `now` is in seconds of CLOCK_MONOTONIC; `process` is the result of `process_state`.
    """
    return RankReport(
        rank=record.rank,
        activity=record.activity,
        doing=record.doing,
        seconds=max(0.0, now - record.since),
        step=record.step,
        collectives=record.waits,
        busy_seconds=record.busy_seconds,
        saving_seconds=None if record.save_began is None else max(0.0, now - record.save_began),
        process=process,
    )


def process_state(pid: int) -> str:
    """Return the state letter of a process from /proc/PID/stat, see proc_pid_stat(5); X if the process does not
    exist."""
    try:
        # The process name comes first, in brackets, and may itself contain brackets: search from the end.
        found = re.search(r"\) (\S)[^)]*$", (_PROCESSES / str(pid) / "stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return _GONE
    return found[1] if found else ""
