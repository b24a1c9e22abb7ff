"""What was heard from the pods, in memory: nothing is lost with it but the time until they report again."""

from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import datetime

from pseudoreal_api.messages import ProgressReport
from pseudoreal_api.reports import PodReport, RankSign

from pseudoreal_operator.observed import Heard, Run

QUIET_SECONDS = 20.0
"""A pod that was not heard for so long is silent: it reports every few seconds."""


@dataclass(frozen=True)
class Speaker:
    """A pod, as its labels say."""

    job_uid: str
    run: Run
    index: int


class Board:
    def __init__(self) -> None:
        self._heard: dict[str, dict[tuple[Run, int], Heard]] = defaultdict(dict)
        self._finish: dict[str, str] = {}

    def hear(self, speaker: Speaker, report: PodReport, now: datetime) -> None:
        known = self._heard[speaker.job_uid].get((speaker.run, speaker.index))
        self._heard[speaker.job_uid][speaker.run, speaker.index] = updated(known, speaker, report, now)

    def read_log(self, speaker: Speaker, progress: ProgressReport, now: datetime) -> None:
        """What a pod that does not report has logged: that it makes steps, and no more."""
        known = self._heard[speaker.job_uid].get((speaker.run, speaker.index))
        if known is None or progress.step > steps_of(known.report):
            ranks = [RankSign(rank=0, place="computing", seconds=0, step=progress.step)]
            self.hear(speaker, PodReport(ranks=ranks, progress=progress), now)

    def of_job(self, uid: str, runs: set[Run]) -> tuple[Heard, ...]:
        """Of these runs; what is known of others is forgotten."""
        kept = {key: heard for key, heard in self._heard.get(uid, {}).items() if heard.run in runs}
        if uid in self._heard:
            self._heard[uid] = kept
        return tuple(kept.values())

    def forget(self, uid: str) -> None:
        self._heard.pop(uid, None)
        self._finish.pop(uid, None)

    def ask_to_finish(self, uid: str, phase: str | None) -> None:
        """The phase of a job that is to end now; None for none."""
        if phase is None:
            self._finish.pop(uid, None)
        else:
            self._finish[uid] = phase

    def is_to_finish(self, speaker: Speaker) -> bool:
        return self._finish.get(speaker.job_uid) == speaker.run.phase


def updated(known: Heard | None, speaker: Speaker, report: PodReport, now: datetime) -> Heard:
    """What is known of a pod after one more report. Pure."""
    if known is None:
        known = Heard(speaker.run, speaker.index, first=now, last=now, report=report)
    at_work = any(rank.place != "starting" for rank in report.ranks)
    grew = steps_of(report) > steps_of(known.report)
    # Not every report repeats what rank 0 knows.
    report = report.model_copy(
        update={
            "progress": report.progress or known.report.progress,
            "checkpoint": report.checkpoint or known.report.checkpoint,
        }
    )
    return replace(
        known,
        last=now,
        report=report,
        begun=known.begun or (now if at_work else None),
        stepped=now if grew else known.stepped,
    )


def steps_of(report: PodReport) -> int:
    return max((rank.step for rank in report.ranks), default=0)
