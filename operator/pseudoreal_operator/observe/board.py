"""What was heard from the pods, kept in memory: after a restart the pods report it again."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from types import MappingProxyType

from pseudoreal_api.wire.messages import ProgressReport
from pseudoreal_api.wire.reports import Membership, PodReport, RankReport, ReportAnswer

from pseudoreal_operator.observe.stages import Execution
from pseudoreal_operator.observe.view import Heard

QUIET_SECONDS = 20.0
"""Seconds after which a pod that was not heard is silent: it reports every few seconds."""
UNHEARD_SECONDS = 60.0
"""Seconds of silence of all pods after which their job says so."""
LEAST_CUT_JOBS = 2
"""Least number of jobs that must be silent for it to be the path."""

SOON_SECONDS = 1.0
"""Seconds after which a job is woken by a pod that began or ended its steps."""
NEWS_SECONDS = 10.0
"""Seconds after which a job is woken by progress: as often as that is written."""
NEWS_PER_SECOND = 20.0
"""Wake-ups in a second for progress, and for pods that train and were not heard before, of all jobs together; with more
of them, each waits longer."""
LOG_SECONDS = 60.0
"""Seconds between two looks at the log of a pod that is silent. Each wait is as long as it has been silent before, as
long as the log has nothing new either."""

JobKey = tuple[str, str]
"""Namespace and uid. Anybody may label a pod with the uid of a job in another namespace: it is not heard."""


@dataclass(frozen=True)
class Speaker:
    """A pod that reports, as its labels describe it."""

    job: JobKey
    execution: Execution
    index: int
    pod: str
    """Its name."""


def _nobody(_after: float) -> None:
    """Nobody is to be woken."""


@dataclass
class _Listening:
    """To the pod of rank 0 of an execution, while it runs: it tells of the progress."""

    speaker: Speaker
    since: datetime
    looked: datetime | None = None
    """When its log was last looked at."""
    line: ProgressReport | None = None
    """The newest progress that its log had then."""

    def log_is_due(self, heard: Heard | None, now: datetime) -> bool:
        """Whether it is silent, and its log was not looked at for long."""
        since = max(self.since, heard.last) if heard else self.since
        if (now - since).total_seconds() <= QUIET_SECONDS:
            return False
        if self.looked is None or self.looked < since:
            return True
        return now - self.looked >= max(timedelta(seconds=LOG_SECONDS), self.looked - since)


@dataclass
class _Followed:
    wake: Callable[[float], None] = _nobody
    finish: frozenset[str] = frozenset()
    """Names of the phases that are to end now."""
    members: Mapping[Execution, Membership] = field(default_factory=dict)
    """Memberships that the status says."""
    heard: dict[tuple[Execution, int], Heard] = field(default_factory=dict)
    listening: _Listening | None = None
    reported: datetime | None = None
    """When a report of any of its pods last arrived."""
    is_woken: bool = False
    """Whether the job was woken as none of its pods is heard any more."""

    def unheard_since(self, now: datetime, seconds: float) -> datetime | None:
        """The moment since which no report arrives, where pods run and it is longer than so many seconds."""
        if self.listening is None:
            return None
        since = max(self.listening.since, self.reported or self.listening.since)
        return since if (now - since).total_seconds() > seconds else None

    def was_heard(self) -> bool:
        """Whether pods that run have reported."""
        return self.listening is not None and self.reported is not None and self.reported >= self.listening.since

    def silent_pod(self, now: datetime) -> _Listening | None:
        """The pod whose log is due."""
        to = self.listening
        return to if to and to.log_is_due(self.heard.get((to.speaker.execution, to.speaker.index)), now) else None


class Board:
    """What was heard of each job that this operator follows: pods of a deleted job may report until they end."""

    def __init__(self) -> None:
        self._jobs: dict[JobKey, _Followed] = {}
        self.path_is_cut = False
        """Whether most jobs are silent, in most namespaces, as `notice_silence` last found: it is the path, then."""

    def follow(
        self,
        job: JobKey,
        finish: frozenset[str],
        wake: Callable[[float], None] = _nobody,
        members: Mapping[Execution, Membership] = MappingProxyType({}),
    ) -> None:
        """`finish` are the phases that are to end now, if they train. `wake`: what to do, with seconds, at news.
        `members`: memberships as the status that is stored says them; pods hear of no other."""
        followed = self._jobs.setdefault(job, _Followed())
        followed.finish, followed.wake, followed.members = finish, wake, members

    def forget(self, job: JobKey) -> None:
        self._jobs.pop(job, None)

    def hear(self, speaker: Speaker, report: PodReport, now: datetime) -> bool:
        """Takes a report: whether its job is followed."""
        followed = self._jobs.get(speaker.job)
        if followed is None:
            return False
        was_unheard = followed.is_woken or followed.unheard_since(now, QUIET_SECONDS)
        followed.reported, followed.is_woken = now, False
        if not self._take(followed, speaker, report, now) and was_unheard:
            self._wake(followed, NEWS_SECONDS)
        return True

    def _take(self, followed: _Followed, speaker: Speaker, report: PodReport, now: datetime) -> bool:
        """Takes what a pod has reported, or logged: whether the job is woken for it."""
        key = (speaker.execution, speaker.index)
        known = followed.heard.get(key)
        followed.heard[key] = heard = updated(known, speaker, report, now)
        if (after := _wake_after(known, heard)) is not None:
            # After a restart of the operator thousands of pods that train are heard for the first time.
            is_urgent = after <= SOON_SECONDS and not (known is None and heard.begun)
            followed.wake(after) if is_urgent else self._wake(followed, after)
        return after is not None

    def _wake(self, followed: _Followed, after: float) -> None:
        """Wakes a job for news that many jobs may have together."""
        followed.wake(max(after, len(self._jobs) / NEWS_PER_SECOND))

    def listen(self, job: JobKey, speaker: Speaker | None, now: datetime) -> None:
        """Listens to the pod of rank 0 of the present execution; to none, where it does not run."""
        followed = self._jobs.get(job)
        if followed is None or (followed.listening and followed.listening.speaker == speaker):
            return
        followed.listening = None if speaker is None else _Listening(speaker, now)

    def most_silent(self, now: datetime) -> Speaker | None:
        """The pod whose log is to be read next, which is noted; None where no pod is silent."""
        due = [silent for followed in self._jobs.values() if (silent := followed.silent_pod(now))]
        if not due:
            return None
        longest = min(due, key=lambda silent: silent.looked or silent.since)
        longest.looked = now
        return longest.speaker

    def read_log(self, speaker: Speaker, progress: ProgressReport, now: datetime) -> None:
        """Takes what a pod that does not report has logged: that it makes steps, or that it has made none since its log
        was last read."""
        followed = self._jobs.get(speaker.job)
        if followed is None:
            return
        key, to = (speaker.execution, speaker.index), followed.listening
        known, before = followed.heard.get(key), to.line if to and to.speaker == speaker else None
        if known is None or progress.step > steps_of(known.report):
            ranks = [RankReport(rank=0, activity="computing", seconds=0, step=progress.step)]
            self._take(followed, speaker, PodReport(ranks=ranks, progress=progress), now)
        elif progress == before:
            followed.heard[key] = replace(known, log_stood=now)
            self._wake(followed, NEWS_SECONDS)
        elif before is not None:
            # Steps that are made anew, from an older checkpoint, are steps as well.
            followed.heard[key] = replace(known, progressed=now)
        if to and to.speaker == speaker:
            to.line = progress

    def notice_silence(self, now: datetime) -> None:
        """Notes whether the path is cut, and wakes the jobs of which no pod is heard any more, each once. To be called
        again and again."""
        self.path_is_cut = _is_path(self.silent_jobs(now))
        for followed in self._jobs.values():
            if not followed.is_woken and followed.unheard_since(now, UNHEARD_SECONDS):
                followed.is_woken = True
                self._wake(followed, NEWS_SECONDS)

    def unheard_since(self, job: JobKey, now: datetime) -> datetime | None:
        followed = self._jobs.get(job)
        return followed.unheard_since(now, UNHEARD_SECONDS) if followed else None

    def was_heard(self, job: JobKey) -> bool:
        followed = self._jobs.get(job)
        return followed is not None and followed.was_heard()

    def silent_jobs(self, now: datetime) -> "Counter[tuple[str, bool]]":
        """Number of the jobs whose pods run and have reported, by namespace and whether all of their pods are silent
        now."""
        return Counter(
            (namespace, followed.unheard_since(now, QUIET_SECONDS) is not None)
            for (namespace, _), followed in self._jobs.items()
            if followed.was_heard()
        )

    def of_job(self, job: JobKey, executions: set[Execution]) -> tuple[Heard, ...]:
        """What was heard of these runs; what is known of others is forgotten."""
        followed = self._jobs.get(job, _Followed())
        followed.heard = {key: heard for key, heard in followed.heard.items() if heard.execution in executions}
        return tuple(followed.heard.values())

    def restarts_in_place(self, speaker: Speaker, now: datetime) -> int:
        """Restarts in place of the pod of the speaker's execution that has begun the most. Pods that are silent may be
        those that a queue took back."""
        followed = self._jobs.get(speaker.job, _Followed())
        return max(
            (
                heard.report.in_place.restarts
                for heard in followed.heard.values()
                if heard.execution == speaker.execution
                and heard.report.in_place
                and (now - heard.last).total_seconds() <= QUIET_SECONDS
            ),
            default=0,
        )

    def answer(self, speaker: Speaker, now: datetime) -> ReportAnswer:
        """The answer to a report that was heard. The pod is told with it."""
        followed = self._jobs.get(speaker.job, _Followed())
        finish, key = speaker.execution.phase in followed.finish, (speaker.execution, speaker.index)
        if finish and (heard := followed.heard.get(key)) is not None and not heard.told_to_finish:
            followed.heard[key] = replace(heard, told_to_finish=True)
            followed.wake(SOON_SECONDS)
        return ReportAnswer(
            finish_phase=finish,
            restarts_in_place=self.restarts_in_place(speaker, now),
            membership=followed.members.get(speaker.execution),
        )


def _is_path(jobs: "Counter[tuple[str, bool]]") -> bool:
    """Whether so many jobs are silent together that it is the path. Nobody can make it seem so with jobs of one
    namespace, where there are several."""
    namespaces = {namespace for namespace, _ in jobs}
    cut = [name for name in namespaces if jobs[name, True] > jobs[name, False]]
    silent = sum(jobs[name, True] for name in namespaces)
    return silent >= LEAST_CUT_JOBS and 2 * silent > jobs.total() and 2 * len(cut) > len(namespaces)


def updated(known: Heard | None, speaker: Speaker, report: PodReport, now: datetime) -> Heard:
    """What is known of a pod after one more report. Pure."""
    if known is None or known.pod != speaker.pod or known.report.in_place != report.in_place:
        known = Heard(speaker.execution, speaker.index, speaker.pod, first=now, last=now, report=report)
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


def _wake_after(known: Heard | None, heard: Heard) -> float | None:
    """Seconds until the job is to be looked at for what a report says; None when that is nothing new."""
    if known is None or known.restarted != heard.restarted or known.waits_to_restart != heard.waits_to_restart:
        return SOON_SECONDS
    if (known.begun is None) != (heard.begun is None) or _has_ended(known) != _has_ended(heard):
        return SOON_SECONDS
    return None if _essence(known) == _essence(heard) else NEWS_SECONDS


def _essence(heard: Heard) -> tuple[int, str | None]:
    checkpoint = heard.report.checkpoint
    return steps_of(heard.report), checkpoint.name if checkpoint else None


def _has_ended(heard: Heard) -> bool:
    return bool(heard.report.ranks) and all(rank.activity == "ended" for rank in heard.report.ranks)


def _is_at_work(rank: RankReport) -> bool:
    """Whether the rank makes steps. Ranks that start wait for each other as well; but one that was busy has made a
    step."""
    return rank.activity in ("computing", "ended") or rank.busy_seconds is not None


def steps_of(report: PodReport) -> int:
    return max((rank.step for rank in report.ranks), default=0)
