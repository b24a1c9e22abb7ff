"""What a pod reports: the signs of its ranks, how far the training is, the newest checkpoint."""

import re
import time
from pathlib import Path

from pseudoreal_api.wire.reports import PodReport, RankSign

from pseudoreal_trainer.heartbeat.stamp_file import Stamp, read_stamp
from pseudoreal_trainer.pod.pod_folder import PodFolder

_PROCESSES = Path("/proc")
_GONE = "X"


def pod_report(folder: PodFolder) -> PodReport:
    return PodReport(ranks=signs_in(folder), progress=folder.progress(), checkpoint=folder.checkpoint())


def signs_in(folder: PodFolder) -> list[RankSign]:
    """Of the ranks that have begun."""
    stamps = [stamp for stamp in map(read_stamp, folder.all_stamps()) if stamp is not None]
    return [sign_of(stamp, time.monotonic(), process_state(stamp.pid)) for stamp in stamps]


def sign_of(stamp: Stamp, now: float, process: str) -> RankSign:
    """Pure. `now`: by the clock of the stamp."""
    return RankSign(
        rank=stamp.rank,
        place=stamp.place,
        doing=stamp.doing,
        seconds=max(0.0, now - stamp.since),
        step=stamp.step,
        collectives=stamp.waits,
        busy_seconds=stamp.busy_seconds,
        saving_seconds=None if stamp.save_began is None else max(0.0, now - stamp.save_began),
        process=process,
    )


def process_state(pid: int) -> str:
    """Its letter in /proc/PID/stat (proc_pid_stat(5)); X when there is no such process any more."""
    try:
        # The name before it, in brackets, may have anything in it.
        found = re.search(r"\) (\S)[^)]*$", (_PROCESSES / str(pid) / "stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return _GONE
    return found[1] if found else ""
