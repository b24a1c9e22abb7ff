"""Report store: the newest reports of the pods, in memory. After a restart of the operator the pods report again."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import chain
from types import MappingProxyType

import structlog
from pseudoreal_api.wire.messages import ProgressReport
from pseudoreal_api.wire.reports import Membership, PodReport, RankReport, ReportAnswer

from pseudoreal_operator.observe.stages import Execution
from pseudoreal_operator.observe.view import LastReport

QUIET_SECONDS = 20.0
"""Seconds without a report after which a pod is silent: pods report every few seconds."""
UNHEARD_SECONDS = 60.0
"""Seconds of silence of all pods after which their job's status reports the silence."""
LEAST_CUT_JOBS = 2
"""Minimum number of silent jobs before the network path counts as faulty."""

SOON_SECONDS = 1.0
"""Seconds until a job is queued again after a pod has begun or ended its steps."""
PROGRESS_SECONDS = 10.0
"""Seconds until a job is queued again after progress. The status is written at the same interval."""
REQUEUES_PER_SECOND = 20.0
"""Passes requested per second for all jobs together, after progress and after first reports of training pods. The more
jobs there are, the longer each pass waits."""
LOG_SECONDS = 60.0
"""Minimum seconds between two readings of the log of a silent pod. Each wait is also at least as long as the pod had
been silent at the previous reading."""

MOST_KEPT = 2**17
"""Maximum size of the kept reports of all jobs (`_size`), about 190 MB. One namespace may have a quarter: no tenant
alone can fill the memory. Beyond half of its quarter, or of all, each arriving report is shortened to one rank, so
there is room for 16,000 pods of a namespace."""

log = structlog.get_logger()

JobKey = tuple[str, str]
"""Namespace and uid of a job. Anyone may label a pod with the uid of a job in another namespace; reports of such a
pod are ignored."""


@dataclass(frozen=True)
class ReportingPod:
    """A reporting pod, as its labels describe it."""

    job: JobKey
    execution: Execution
    index: int
    pod: str
    """Name of the pod."""


def _queue_nothing(_after: float) -> None:
    """Queue no job."""


@dataclass
class _RankZeroPod:
    """The running pod of rank 0 of an execution, which reports the progress."""

    reporter: ReportingPod
    since: datetime
    log_read_at: datetime | None = None
    """Time at which the pod's log was last read; None: never."""
    last_progress: ProgressReport | None = None
    """Newest progress in the log when last read; None: the log had no progress, or was never read."""

    def log_is_due(self, last_report: LastReport | None, now: datetime) -> bool:
        """Return whether the pod is silent and its log was not read recently."""
        since = max(self.since, last_report.last) if last_report else self.since
        if (now - since).total_seconds() <= QUIET_SECONDS:
            return False
        if self.log_read_at is None:
            return True
        # The difference is negative if the pod has reported since: a pod that reports now and then has LOG_SECONDS too.
        return now - self.log_read_at >= max(timedelta(seconds=LOG_SECONDS), self.log_read_at - since)


@dataclass
class _ReportsOfExecution:
    """Newest reports of the pods of one execution, which may be 10,000. Both fields are by completion index."""

    newest: dict[int, LastReport] = field(default_factory=dict)
    restarted: dict[int, dict[int, datetime]] = field(default_factory=dict)
    """Number of restarts in place -> times of the newest reports with this number, in the order of the times."""

    def add(self, index: int, last_report: LastReport) -> None:
        self._remove_restarts(index)
        self.newest[index] = last_report
        if last_report.report.in_place:
            self.restarted.setdefault(last_report.report.in_place.restarts, {})[index] = last_report.last

    def remove(self, index: int) -> None:
        self._remove_restarts(index)
        del self.newest[index]

    def _remove_restarts(self, index: int) -> None:
        if (known := self.newest.get(index)) and known.report.in_place:
            number = known.report.in_place.restarts
            del self.restarted[number][index]
            if not self.restarted[number]:
                del self.restarted[number]

    def restarts_in_place(self, now: datetime) -> int:
        """Return the highest number of restarts in place of any pod that is not silent. Each answer contains this
        number, so it must not cost a look at every report."""
        for number in sorted(self.restarted, reverse=True):
            last = self.restarted[number][next(reversed(self.restarted[number]))]
            if (now - last).total_seconds() <= QUIET_SECONDS:
                return number
        return 0


@dataclass
class _Followed:
    requeue: Callable[[float], None] = _queue_nothing
    finish: frozenset[str] = frozenset()
    """Names of the phases that are to end now, at the user's request."""
    members: Mapping[Execution, Membership] = field(default_factory=dict)
    """Execution -> membership in the stored status."""
    pods: Mapping[str, int] = field(default_factory=dict)
    """Phase name -> maximum number of pods of an execution."""
    reports: dict[Execution, _ReportsOfExecution] = field(default_factory=dict)
    places: dict[str, tuple[Execution, int]] = field(default_factory=dict)
    """Name of a pod -> execution and index of its kept report. A pod has one: whoever may change the labels and
    annotations of a pod can let it report under any execution and index."""
    rank_zero_pod: _RankZeroPod | None = None
    reported: datetime | None = None
    """Time of the newest report of any pod of the job; None: no report has arrived."""
    refused: datetime | None = None
    """Time of the newest report for which there was no room, even shortened; None: there was always room."""
    is_requeued: bool = False
    """Whether the job was already queued again because all of its pods are silent."""

    def has_pod(self, reporter: ReportingPod) -> bool:
        """Return whether the job may have a pod with this phase and completion index."""
        return reporter.index < self.pods.get(reporter.execution.phase, 0)

    def reports_of(self, execution: Execution) -> _ReportsOfExecution:
        """Return the reports of an execution; if there are none, a new empty object that is not stored."""
        return self.reports.get(execution) or _ReportsOfExecution()

    def last_report(self, reporter: ReportingPod) -> LastReport | None:
        return self.reports_of(reporter.execution).newest.get(reporter.index)

    def keep(self, last_report: LastReport) -> int:
        """Keep the newest report of a pod; return the change in the number of kept ranks, as counted by MOST_KEPT."""
        execution, index = last_report.execution, last_report.index
        reports = self.reports.setdefault(execution, _ReportsOfExecution())
        known = reports.newest.get(index)
        if known is not None and known.pod != last_report.pod:
            del self.places[known.pod]
        reports.add(index, last_report)
        self.places[last_report.pod] = execution, index
        return _size(last_report.report) - (_size(known.report) if known else 0)

    def drop(self, execution: Execution, index: int) -> int:
        """Forget a report, if there is one; return the change in the number of kept ranks."""
        reports = self.reports_of(execution)
        if (known := reports.newest.get(index)) is None:
            return 0
        reports.remove(index)
        del self.places[known.pod]
        if not reports.newest:
            del self.reports[execution]
        return -_size(known.report)

    def silent_since(self, now: datetime, seconds: float) -> datetime | None:
        """Return the start of the silence of all pods, if pods run and the silence is longer than `seconds`; else
        None."""
        if self.rank_zero_pod is None:
            return None
        since = max(self.rank_zero_pod.since, self.reported or self.rank_zero_pod.since)
        return since if (now - since).total_seconds() > seconds else None

    def has_reported(self) -> bool:
        """Return whether a report has arrived since a pass first saw the running pod of rank 0."""
        return (
            self.rank_zero_pod is not None and self.reported is not None and self.reported >= self.rank_zero_pod.since
        )

    def silent_pod(self, now: datetime) -> _RankZeroPod | None:
        """Return the pod of rank 0 if its log should be read now; else None. The log tells nothing that is needed while
        another pod reports ranks of the same execution: then the path works, and that pod tells of a hang. A spare pod
        has no ranks, and cannot tell."""
        to = self.rank_zero_pod
        if to is None or not to.log_is_due(self.last_report(to.reporter), now):
            return None
        others = self.reports_of(to.reporter.execution).newest.values()
        heard = (one for one in others if (now - one.last).total_seconds() <= QUIET_SECONDS)
        return None if any(one.report.ranks for one in heard) else to


class ReportStore:
    """Newest reports of each job that this operator follows. Other reports are rejected: pods of a deleted job may
    report until they end."""

    def __init__(self) -> None:
        self._jobs: dict[JobKey, _Followed] = {}
        self._kept: Counter[str] = Counter()
        """Namespace -> number of kept ranks, as counted by MOST_KEPT."""
        self.path_is_cut = False
        """Whether most jobs, in most namespaces, were silent when `notice_silence` was last called: then the network
        path is at fault."""

    def follow(
        self,
        job: JobKey,
        pods: Mapping[str, int],
        finish: frozenset[str] = frozenset(),
        requeue: Callable[[float], None] = _queue_nothing,
        members: Mapping[Execution, Membership] = MappingProxyType({}),
    ) -> None:
        """Follow a job. `pods`: phase name -> maximum number of pods of an execution; reports of other phases, and of
        pods with higher indices, are rejected. `finish`: names of phases to end now, if they train. `requeue`: called
        with a delay in seconds when reports require a pass. `members`: memberships in the stored status; answers to
        pods contain no others."""
        followed = self._jobs.setdefault(job, _Followed())
        followed.finish, followed.requeue, followed.members, followed.pods = finish, requeue, members, pods

    def forget(self, job: JobKey) -> None:
        if (followed := self._jobs.pop(job, None)) is not None:
            kept = chain.from_iterable(reports.newest.values() for reports in followed.reports.values())
            self._count(job, -sum(_size(one.report) for one in kept))

    def store(self, reporter: ReportingPod, report: PodReport, now: datetime) -> bool:
        """Process a report if its job is followed, and may have this pod; return whether it is processed. If there is
        no room, the report is shortened; without room for this, it is not kept, but the pod still gets an answer."""
        followed = self._jobs.get(reporter.job)
        if followed is None or not followed.has_pod(reporter):
            return False
        was_unheard = followed.is_requeued or followed.silent_since(now, QUIET_SECONDS)
        followed.reported, followed.is_requeued = now, False
        if not self._update(followed, reporter, report, now) and was_unheard:
            self._requeue_in_turn(followed, PROGRESS_SECONDS)
        return True

    def _update(self, followed: _Followed, reporter: ReportingPod, report: PodReport, now: datetime) -> bool:
        """Store a report, or progress from a log; return whether the job is queued again for it."""
        known, place = followed.last_report(reporter), followed.places.get(reporter.pod)
        has_moved = place is not None and place != (reporter.execution, reporter.index)
        if place is not None and has_moved:
            self._count(reporter.job, followed.drop(*place))
        last_report = merge_report(known, reporter, report, now)
        size = _size(known.report) if known else 0
        if not self._has_room(reporter.job, _size(last_report.report) - size, MOST_KEPT // 2):
            last_report = replace(last_report, report=_shortened(last_report.report))
        more = _size(last_report.report) - size
        if more > 0 and not self._has_room(reporter.job, more, MOST_KEPT):
            # The report before would make the pod look silent.
            self._count(reporter.job, followed.drop(reporter.execution, reporter.index))
            if not self.refuses_reports(reporter.job, now):
                log.warning("reports_not_kept", namespace=reporter.job[0], uid=reporter.job[1])
            followed.refused = now
            return False
        self._count(reporter.job, followed.keep(last_report))
        # Execution and index of a pod of the operator never change, so such a report tells a pass nothing.
        if has_moved:
            return False
        if (after := _requeue_after(known, last_report)) is not None:
            # After a restart of the operator, thousands of training pods report for the first time, so these are not
            # urgent.
            is_urgent = after <= SOON_SECONDS and not (known is None and last_report.training_since)
            followed.requeue(after) if is_urgent else self._requeue_in_turn(followed, after)
        return after is not None

    def _has_room(self, job: JobKey, more: int, most: int) -> bool:
        """Return whether there is room for reports of the job that are larger by `more`, if all jobs together may have
        `most`."""
        return self._kept[job[0]] + more <= most // 4 and self._kept.total() + more <= most

    def _count(self, job: JobKey, change: int) -> None:
        """Note a change in the number of kept ranks of the job."""
        self._kept[job[0]] += change
        if not self._kept[job[0]]:
            del self._kept[job[0]]

    def _requeue_in_turn(self, followed: _Followed, after: float) -> None:
        """Queue a job again for a change that many jobs may have at the same time."""
        followed.requeue(max(after, len(self._jobs) / REQUEUES_PER_SECOND))

    def set_rank_zero_pod(self, job: JobKey, reporter: ReportingPod | None, now: datetime) -> None:
        """Set the running pod of rank 0 of the present execution; None: it does not run."""
        followed = self._jobs.get(job)
        if followed is None or (followed.rank_zero_pod and followed.rank_zero_pod.reporter == reporter):
            return
        followed.rank_zero_pod = None if reporter is None else _RankZeroPod(reporter, now)

    def most_silent(self, now: datetime) -> ReportingPod | None:
        """Return the pod of a silent job with the log that has waited longest to be read, and record `now` as the time
        of the reading; None if no log should be read now."""
        due = [silent for followed in self._jobs.values() if (silent := followed.silent_pod(now))]
        if not due:
            return None
        longest = min(due, key=lambda silent: silent.log_read_at or silent.since)
        longest.log_read_at = now
        return longest.reporter

    def read_log(self, reporter: ReportingPod, progress: ProgressReport, now: datetime) -> None:
        """Process the log of a pod that does not report: either the pod makes steps, or it has made none since the
        previous reading."""
        followed = self._jobs.get(reporter.job)
        if followed is None:
            return
        to, newest = followed.rank_zero_pod, followed.reports_of(reporter.execution).newest
        known, before = newest.get(reporter.index), to.last_progress if to and to.reporter == reporter else None
        if known is None or progress.step > known.steps:
            ranks = [RankReport(rank=0, activity="computing", seconds=0, step=progress.step)]
            # A log does not tell of restarts in place: the pod stays a member of the membership that it has begun.
            in_place = known.report.in_place if known else None
            self._update(followed, reporter, PodReport(ranks=ranks, progress=progress, in_place=in_place), now)
        elif progress == before:
            newest[reporter.index] = replace(known, log_unchanged=now)
            self._requeue_in_turn(followed, PROGRESS_SECONDS)
        elif before is not None:
            # Steps repeated from an older checkpoint are progress as well.
            newest[reporter.index] = replace(known, progressed=now)
        if to and to.reporter == reporter:
            # The time of the reading is not before the time of the report that came of it: otherwise the report would
            # end a silence, and the log would be due again after a short one.
            to.last_progress, to.log_read_at = progress, now

    def notice_silence(self, now: datetime) -> None:
        """Update `path_is_cut`, and queue each job again once when all of its pods have fallen silent. Must be called
        periodically."""
        self.path_is_cut = _is_path_cut(self.silent_jobs(now))
        for followed in self._jobs.values():
            if not followed.is_requeued and followed.silent_since(now, UNHEARD_SECONDS):
                followed.is_requeued = True
                self._requeue_in_turn(followed, PROGRESS_SECONDS)

    def silent_since(self, job: JobKey, now: datetime) -> datetime | None:
        followed = self._jobs.get(job)
        return followed.silent_since(now, UNHEARD_SECONDS) if followed else None

    def has_reported(self, job: JobKey) -> bool:
        followed = self._jobs.get(job)
        return followed is not None and followed.has_reported()

    def refuses_reports(self, job: JobKey, now: datetime) -> bool:
        """Return whether there was no room for a recent report of the job, even shortened."""
        refused = self._jobs.get(job, _Followed()).refused
        return refused is not None and (now - refused).total_seconds() <= QUIET_SECONDS

    def silent_jobs(self, now: datetime) -> "Counter[tuple[str, bool]]":
        """Return (namespace, is silent) -> number of jobs. A job is silent if all of its pods are silent. Only jobs
        with running pods that have reported are counted."""
        return Counter(
            (namespace, followed.silent_since(now, QUIET_SECONDS) is not None)
            for (namespace, _), followed in self._jobs.items()
            if followed.has_reported()
        )

    def forget_other_executions(self, job: JobKey, executions: set[Execution]) -> None:
        """Forget the reports of all executions but these."""
        followed = self._jobs.get(job, _Followed())
        for execution in followed.reports.keys() - executions:
            for index in [*followed.reports[execution].newest]:
                self._count(job, followed.drop(execution, index))

    def of_job(self, job: JobKey) -> tuple[LastReport, ...]:
        """Return the kept reports of the job."""
        followed = self._jobs.get(job, _Followed())
        return tuple(chain.from_iterable(reports.newest.values() for reports in followed.reports.values()))

    def restarts_in_place(self, reporter: ReportingPod, now: datetime) -> int:
        """Return the highest number of restarts in place of any pod of the reporter's execution. Silent pods are
        ignored, because a queue may have taken them back."""
        return self._jobs.get(reporter.job, _Followed()).reports_of(reporter.execution).restarts_in_place(now)

    def answer(self, reporter: ReportingPod, now: datetime) -> ReportAnswer:
        """Return the answer to a stored report. Record if the answer tells the pod to finish its phase."""
        followed = self._jobs.get(reporter.job, _Followed())
        newest = followed.reports_of(reporter.execution).newest
        finish = reporter.execution.phase in followed.finish
        if finish and (last_report := followed.last_report(reporter)) and not last_report.told_to_finish:
            newest[reporter.index] = replace(last_report, told_to_finish=True)
            followed.requeue(SOON_SECONDS)
        membership = followed.members.get(reporter.execution)
        if membership is not None and (last_report := followed.last_report(reporter)):
            newest[reporter.index] = told = with_told(last_report, membership.restart, now)
            if told is not last_report:
                # A pass takes up the clock of the pod, which may never begin the membership.
                self._requeue_in_turn(followed, PROGRESS_SECONDS)
        return ReportAnswer(
            finish_phase=finish,
            restarts_in_place=self.restarts_in_place(reporter, now),
            membership=membership,
        )


def with_told(last_report: LastReport, membership: int, now: datetime) -> LastReport:
    """Return the state of a pod after an answer with the membership that begins with restart `membership`. Pure."""
    told = last_report.told_membership
    if last_report.restarts_in_place >= membership or (told is not None and told[0] == membership):
        return last_report
    return replace(last_report, told_membership=(membership, now))


def _is_path_cut(jobs: "Counter[tuple[str, bool]]") -> bool:
    """Return whether the network path is at fault: most jobs are silent, in most namespaces. If there are several
    namespaces, no tenant alone can simulate this fault."""
    namespaces = {namespace for namespace, _ in jobs}
    cut = [name for name in namespaces if jobs[name, True] > jobs[name, False]]
    silent = sum(jobs[name, True] for name in namespaces)
    return silent >= LEAST_CUT_JOBS and 2 * silent > jobs.total() and 2 * len(cut) > len(namespaces)


def merge_report(known: LastReport | None, reporter: ReportingPod, report: PodReport, now: datetime) -> LastReport:
    """Return the state of a pod after one more report. Pure."""
    steps = max((rank.step for rank in report.ranks), default=0)
    if known is None or known.pod != reporter.pod or known.report.in_place != report.in_place:
        known = LastReport(
            reporter.execution, reporter.index, reporter.pod, first=now, last=now, report=report, steps=steps
        )
    grew = steps > known.steps
    at_work = grew or any(_is_at_work(rank) for rank in report.ranks)
    # A save counts as progress, because steps may wait for it; saves have their own hang clock.
    saves = any(rank.saving_seconds is not None for rank in report.ranks)
    # Only rank 0 knows progress and checkpoint, and not every report repeats them: keep the known values.
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
        steps=steps,
        training_since=known.training_since or (now if at_work else None),
        progressed=now if grew or saves else known.progressed,
    )


def _size(report: PodReport) -> int:
    """Return the size of a report in ranks: the ranks, one for progress, checkpoint and layout each, and one for the
    rest."""
    others = (report.progress, report.checkpoint, report.layout)
    return 1 + len(report.ranks) + sum(part is not None for part in others)


def _shortened(report: PodReport) -> PodReport:
    """Return the report with only one rank, the most suspect of a hang, and with the age of the pod's oldest save. The
    layout, equal in the reports of all pods, stays only beside the progress, so in one report."""
    if not report.ranks:
        return report
    suspect = min(report.ranks, key=_suspicion)
    saving = max((rank.saving_seconds for rank in report.ranks if rank.saving_seconds is not None), default=None)
    kept: dict[str, object] = {"ranks": [suspect.model_copy(update={"saving_seconds": saving})]}
    return report.model_copy(update=kept if report.progress else kept | {"layout": None})


def _suspicion(rank: RankReport) -> tuple[bool, bool, bool, int, float]:
    """Return a sort key of the ranks of a pod, the most suspect first; the criteria are those in
    `failures.hang.suspected_ranks`."""
    is_halted = rank.process in ("T", "Z")
    return rank.activity == "ended", not is_halted, rank.activity == "waiting", rank.step, -rank.seconds


def _requeue_after(known: LastReport | None, last_report: LastReport) -> float | None:
    """Return the seconds until the job needs a pass for a report; None: the report changes nothing."""
    if (
        known is None
        or known.restarted != last_report.restarted
        or known.waits_to_restart != last_report.waits_to_restart
    ):
        return SOON_SECONDS
    if (known.training_since is None) != (last_report.training_since is None) or _has_ended(known) != _has_ended(
        last_report
    ):
        return SOON_SECONDS
    return None if _step_and_checkpoint(known) == _step_and_checkpoint(last_report) else PROGRESS_SECONDS


def _step_and_checkpoint(last_report: LastReport) -> tuple[int, str | None]:
    checkpoint = last_report.report.checkpoint
    return last_report.steps, checkpoint.name if checkpoint else None


def _has_ended(last_report: LastReport) -> bool:
    return bool(last_report.report.ranks) and all(rank.activity == "ended" for rank in last_report.report.ranks)


def _is_at_work(rank: RankReport) -> bool:
    """Return whether the rank makes steps or has ended. Waiting alone proves nothing, because starting ranks wait for
    each other too; a rank with busy seconds has made a step."""
    return rank.activity in ("computing", "ended") or rank.busy_seconds is not None
