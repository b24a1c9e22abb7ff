"""What a pod reports: the heartbeats of its ranks, how far the training is, the newest checkpoint."""

import re
import time
from pathlib import Path

from pseudoreal_api.wire.reports import PodReport, RankReport

from pseudoreal_trainer.heartbeat.record import HeartbeatRecord, read_heartbeat
from pseudoreal_trainer.pod.pod_folder import PodFolder

_PROCESSES = Path("/proc")
_GONE = "X"


def pod_report(folder: PodFolder) -> PodReport:
    # Before the ranks, which are those of this restart or of a later one, and never of an earlier one.
    in_place = folder.in_place()
    return PodReport(
        ranks=rank_heartbeats(folder),
        progress=folder.progress(),
        checkpoint=folder.checkpoint(),
        layout=folder.layout(),
        in_place=in_place,
    )


def rank_heartbeats(folder: PodFolder) -> list[RankReport]:
    """The newest heartbeat of each rank that has begun."""
    records = [record for record in map(read_heartbeat, folder.heartbeats()) if record is not None]
    return [rank_heartbeat(record, time.monotonic(), process_state(record.pid)) for record in records]


def rank_heartbeat(record: HeartbeatRecord, now: float, process: str) -> RankReport:
    """What a pod reports of a rank. Pure. `now`: seconds of CLOCK_MONOTONIC. `process`: the state that `process_state`
    finds."""
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
    """State of a process: its letter in /proc/PID/stat (proc_pid_stat(5)); X when there is no such process any more."""
    try:
        # The name before it, in brackets, may have anything in it.
        found = re.search(r"\) (\S)[^)]*$", (_PROCESSES / str(pid) / "stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return _GONE
    return found[1] if found else ""
