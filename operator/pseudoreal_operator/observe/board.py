"""What was heard from the pods, in memory: nothing is lost with it but the time until they report again."""

from dataclasses import dataclass, field, replace
from datetime import datetime

from pseudoreal_api.messages import ProgressReport
from pseudoreal_api.reports import PodReport, RankSign

from pseudoreal_operator.observe.observed import Heard, Run

QUIET_SECONDS = 20.0
"""A pod that was not heard for so long is silent: it reports every few seconds."""

JobKey = tuple[str, str]
"""Namespace and uid. Anybody may label a pod with the uid of a job in another namespace: it is not heard."""


@dataclass(frozen=True)
class Speaker:
    """A pod, as its labels say."""

    job: JobKey
    run: Run
    index: int


@dataclass
class _Followed:
    finish_phase: str | None = None
    heard: dict[tuple[Run, int], Heard] = field(default_factory=dict)


class Board:
    """Of the jobs that this operator follows: pods of a deleted job may report until they end."""

    def __init__(self) -> None:
        self._jobs: dict[JobKey, _Followed] = {}

    def follow(self, job: JobKey, finish_phase: str | None) -> None:
        """`finish_phase` is to end now, if it is the one that trains."""
        self._jobs.setdefault(job, _Followed()).finish_phase = finish_phase

    def forget(self, job: JobKey) -> None:
        self._jobs.pop(job, None)

    def hear(self, speaker: Speaker, report: PodReport, now: datetime) -> bool:
        """Whether the job is followed."""
        followed = self._jobs.get(speaker.job)
        if followed is None:
            return False
        key = (speaker.run, speaker.index)
        followed.heard[key] = updated(followed.heard.get(key), speaker, report, now)
        return True

    def read_log(self, speaker: Speaker, progress: ProgressReport, now: datetime) -> None:
        """What a pod that does not report has logged: that it makes steps, and no more."""
        followed = self._jobs.get(speaker.job, _Followed())
        known = followed.heard.get((speaker.run, speaker.index))
        if known is None or progress.step > steps_of(known.report):
            ranks = [RankSign(rank=0, place="computing", seconds=0, step=progress.step)]
            self.hear(speaker, PodReport(ranks=ranks, progress=progress), now)

    def of_job(self, job: JobKey, runs: set[Run]) -> tuple[Heard, ...]:
        """Of these runs; what is known of others is forgotten."""
        followed = self._jobs.get(job, _Followed())
        followed.heard = {key: heard for key, heard in followed.heard.items() if heard.run in runs}
        return tuple(followed.heard.values())

    def is_to_finish(self, speaker: Speaker) -> bool:
        followed = self._jobs.get(speaker.job)
        return followed is not None and followed.finish_phase == speaker.run.phase


def updated(known: Heard | None, speaker: Speaker, report: PodReport, now: datetime) -> Heard:
    """What is known of a pod after one more report. Pure."""
    if known is None:
        known = Heard(speaker.run, speaker.index, first=now, last=now, report=report)
    grew = steps_of(report) > steps_of(known.report)
    at_work = grew or any(_is_at_work(rank) for rank in report.ranks)
    # A save may hold up the steps, and has a clock of its own.
    saves = any(rank.saving_seconds is not None for rank in report.ranks)
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
        progressed=now if grew or saves else known.progressed,
    )


def _is_at_work(rank: RankSign) -> bool:
    """Ranks that start wait for each other as well; but one that was busy has made a step."""
    return rank.place in ("computing", "ended") or rank.busy_seconds is not None


def steps_of(report: PodReport) -> int:
    return max((rank.step for rank in report.ranks), default=0)
