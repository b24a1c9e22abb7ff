"""Detection of a hung training stage, and of the rank to blame. Pure.

There are three clocks. Start: from the first report of the last pod (or from its start, if it has not reported) to the
first step. Step: from step to step, while nothing is saved. Checkpoint: from the start of a save to its commit. All
clocks are derived from reports of the present execution and membership, so each starts them from zero.

A clock has run out only if a witness confirms it: a report without progress at about that time, or a log without news.
Silence proves nothing: if no pod reports, the reports may not reach the operator, and training goes on without them. A
pod that fell silent is suspected only of a hang that other pods report.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median

from pseudoreal_api.resolved.cache import cache_per_object
from pseudoreal_api.wire.reports import REPORT_SECONDS, RankReport

from pseudoreal_operator import clock
from pseudoreal_operator.observe.report_store import QUIET_SECONDS, UNHEARD_SECONDS
from pseudoreal_operator.observe.view import LastReport, Pod, PodPhase, View
from pseudoreal_operator.observe.worker_assignment import memberships, reports_of_members

HANG_REASONS = ("StartStalled", "StepStalled", "CheckpointStalled")
"""Reasons of a Hang."""
_NAMED = 4
"""Maximum number of ranks that a sentence names."""
_HALTED = ("T", "t", "Z", "X")
"""States of a process that does nothing: stopped, stopped by a debugger, zombie, dead."""
_STILL = 0.8
"""Share of the straggler factor below which a known straggler stops being a straggler."""


@dataclass(frozen=True)
class Hang:
    """A hung training stage. `culprit`: pod of the first suspected rank; None: no pod is suspected."""

    reason: str
    sentence: str
    culprit: Pod | None
    unreachable: tuple[Pod, ...] = ()
    """Suspected pods that do not report, and so cannot be told to restart their ranks."""


@dataclass(frozen=True)
class _Clock:
    """A running clock. `missing`: the awaited progress, in words; `waited`, `allowed`: seconds; `field`: the limit's
    field in spec."""

    reason: str
    missing: str
    waited: float
    allowed: int
    field: str

    def is_over(self, unheard: float) -> bool:
        """Return whether the clock has run out, and the last witness came after the limit or at most REPORT_SECONDS
        before it. `unheard`: seconds since the last witness."""
        return self.waited > self.allowed and self.waited - unheard >= self.allowed - REPORT_SECONDS


def find_hang(view: View) -> Hang | None:
    unheard = _unheard_seconds(view)
    over = next((clock for clock in _clocks(view) if clock.is_over(unheard)), None)
    return None if over is None else _hang(view, over)


def seconds_to_hang(view: View) -> float | None:
    """Return the seconds until the next check of the clocks; None if no check is needed. While pods report, a clock
    that has run out without a witness is checked again after REPORT_SECONDS. While the network path is cut, no clock
    runs, and the next check is after UNHEARD_SECONDS."""
    unheard = _unheard_seconds(view)
    reports = unheard <= QUIET_SECONDS
    if reports and _is_cut_off(view):
        return UNHEARD_SECONDS
    clocks = [clock for clock in _clocks(view) if not clock.is_over(unheard)]
    running = [clock.allowed - clock.waited for clock in clocks if clock.waited <= clock.allowed]
    return min([*running, *([REPORT_SECONDS] if reports and len(running) < len(clocks) else [])], default=None)


@cache_per_object
def _unheard_seconds(view: View) -> float:
    """Return the seconds since the last witness: a report, or a log that was read and had nothing new."""
    said = [last_report.last for last_report in view.reporting]
    said += [last_report.log_unchanged for last_report in view.reporting if last_report.log_unchanged]
    return _seconds(view, max(said, default=view.now))


def _is_cut_off(view: View) -> bool:
    """Return whether a pod of the execution is silent while most jobs are silent: the network path is at fault then."""
    return view.observed.path_is_cut and any(is_silent(view, last_report) for last_report in view.reporting)


@cache_per_object
def _clocks(view: View) -> list[_Clock]:
    return [*_each_clock(view)]


def _each_clock(view: View) -> Iterator[_Clock]:
    members, told = reports_of_members(view), _told(view)
    if not (members or told) or _all_ended(members):
        return
    if _is_cut_off(view):
        return
    clocks = view.spec.hang
    begun = [last_report.training_since for last_report in members if last_report.training_since]
    if not begun and not told and view.started_pods < view.workers:
        return  # pods that wait for a node have their own deadline; a pod that is missing later is lost
    if not begun:
        waited = _seconds(view, max([*(last_report.first for last_report in members), *told, *_starts(view)]))
        yield _Clock("StartStalled", "first step", waited, clocks.start_seconds, "hang.startSeconds")
        return
    what = "commit of the checkpoint that is being saved"
    for saving in sorted(_saving_seconds(view), reverse=True)[:1]:
        yield _Clock("CheckpointStalled", what, saving, clocks.checkpoint_seconds, "hang.checkpointSeconds")
    last = max(begun + [last_report.progressed for last_report in members if last_report.progressed])
    yield _Clock("StepStalled", "step", _seconds(view, last), clocks.step_seconds, "hang.stepSeconds")


def _starts(view: View) -> list[datetime]:
    """Return the start times of pods that have not reported yet: such a pod may have only just started."""
    reporting = {last_report.index for last_report in view.reporting}
    return [clock.from_text(pod.started) for pod in view.pods if pod.started and pod.index not in reporting]


def _told(view: View) -> list[datetime]:
    """Return the times at which pods were told of the present membership that they have not begun. A spare pod that
    waited has been told of earlier memberships, too, and never begins them."""
    present = memberships(view.status).get(view.execution)
    told = [last_report.told_membership for last_report in view.reporting if last_report.told_membership]
    return [time for restart, time in told if present is not None and restart == present.restart]


def straggler_sentence(view: View, *, known: bool) -> str | None:
    """Return a sentence that names the slowest rank, if it is much slower than the others; else None. `known`: whether
    the last pass found a straggler. The bound is then lower: a rank close to the bound would otherwise be a straggler
    in one step and not in the next."""
    factor = float(view.spec.hang.straggler_factor)
    found = stragglers(_rank_reports(view), factor * _STILL if known else factor)
    if not found:
        return None
    rank = found[0][0]
    return (
        f"{_rank_title(view, rank)} is a straggler: it computes more than {view.spec.hang.straggler_factor} times as"
        " long per step as the median rank, and all other ranks wait for it. What to do: check that node for low"
        " clock rates, throttling and other workloads"
    )


def _hang(view: View, over: _Clock) -> Hang:
    unreachable = _unreachable_pods(view)
    ranks = [view.first_rank(pod) for pod in unreachable] or _waited_for_ranks(view)
    step = max((last_report.steps for last_report in view.reporting), default=0)
    named = "; ".join(_describe(view, rank) for rank in ranks[:_NAMED])
    blame = named or _no_suspect_sentence(view)
    sentence = f"No {over.missing} for {over.allowed} s (spec.{over.field}) at step {step}: {blame}."
    culprit = view.pod_of_rank(ranks[0]) if ranks else None
    return Hang(over.reason, sentence, culprit, tuple(unreachable))


def _unreachable_pods(view: View) -> list[Pod]:
    """Return the suspected pods that cannot report that they wait: members that fell silent, then running pods that
    have not reported as members, unless there is no room for some reports. Empty if no member reports."""
    members, silent = reports_of_members(view), _silent_pods(view)
    if len(silent) == len(members):
        return []
    if view.observed.refuses_reports:
        return silent
    reporting = {last_report.index for last_report in members}
    return silent + [pod for pod in view.pods if pod.phase is PodPhase.RUNNING and pod.index not in reporting]


def _silent_pods(view: View) -> list[Pod]:
    """Return the members that have fallen silent, in the order of their numbers."""
    silent = {last_report.index for last_report in reports_of_members(view) if is_silent(view, last_report)}
    return [pod for pod in view.pods if pod.index in silent]


def _waited_for_ranks(view: View) -> list[int]:
    """Return the suspected ranks, the most suspect first, when all pods report or none does."""
    signs = _rank_reports(view)
    silent = [view.first_rank(pod) for pod in _silent_pods(view)]
    return suspected_ranks(signs) or ([signs[0].rank] if len(signs) == 1 else silent)


def _describe(view: View, rank: int) -> str:
    members = reports_of_members(view)
    last_report = next((one for one in members if any(sign.rank == rank for sign in one.report.ranks)), None)
    if last_report is None:
        pod = view.pod_of_rank(rank)
        said = pod is not None and any(one.index == pod.index for one in view.reporting)
        return f"{_rank_title(view, rank)} {'has not joined its new peers' if said else 'has never reported'}"
    sign = next(sign for sign in last_report.report.ranks if sign.rank == rank)
    if is_silent(view, last_report):
        return f"{_rank_title(view, rank)} has not reported since {last_report.last:%H:%M:%S} UTC"
    if sign.process in ("T", "Z"):
        return f"{_rank_title(view, rank)} is {'stopped' if sign.process == 'T' else 'dead'}"
    doing = f" ({sign.doing})" if sign.doing else ""
    return f"{_rank_title(view, rank)} is {sign.activity}{doing} since step {sign.step}"


def _no_suspect_sentence(view: View) -> str:
    if _rank_reports(view):
        together = " or ".join(sorted({sign.activity for sign in _rank_reports(view)}))
        return f"no single rank is suspected: all ranks are {together}"
    return (
        f"the pods run, but have not all connected to {_rank_title(view, 0)} so no rank has started. What to do:"
        " check that every pod can resolve its name and connect to it (a pod that cannot logs"
        " waits_for_worker_0)"
    )


def _rank_title(view: View, rank: int) -> str:
    pod = view.pod_of_rank(rank)
    return f"rank {rank} on pod {pod.name}, node {pod.node or '(none)'}," if pod else f"rank {rank}"


def _rank_reports(view: View) -> list[RankReport]:
    return [sign for last_report in reports_of_members(view) for sign in last_report.report.ranks]


def _saving_seconds(view: View) -> Iterator[float]:
    members = reports_of_members(view)
    saving = [
        (last_report, sign.saving_seconds)
        for last_report in members
        for sign in last_report.report.ranks
        if sign.saving_seconds is not None
    ]
    if not saving:
        return
    newest = max((last_report.progressed for last_report in members if last_report.progressed), default=None)
    for last_report, seconds in saving:
        # All ranks save together: if others have progressed since, a pod that fell silent has saved as well.
        if not (is_silent(view, last_report) and newest and newest > last_report.last):
            yield seconds + _seconds(view, last_report.last)


def _all_ended(last_reports: list[LastReport]) -> bool:
    if any(sign.activity != "ended" for one in last_reports for sign in one.report.ranks):
        return False
    return any(one.report.ranks for one in last_reports)


def is_silent(view: View, last_report: LastReport) -> bool:
    return _seconds(view, last_report.last) > QUIET_SECONDS


def _seconds(view: View, since: datetime) -> float:
    return (view.now - since).total_seconds()


def suspected_ranks(signs: Sequence[RankReport]) -> list[int]:
    """Return the ranks that the others wait for, the best explanation first; empty if no rank can be singled out.

    Criteria, in this order: stopped or dead processes; ranks that do not wait while others do, the rank that is longest
    in its state first; one rank a step behind at least two others. Several ranks may be behind without fault: data
    comes to a rank through other ranks, and the rank in between may be the one that is stopped. Of two ranks, the one
    behind may lack a message that the other has not sent.
    """
    running = [sign for sign in signs if sign.activity != "ended"]
    halted = [sign for sign in running if sign.process in _HALTED]
    if halted:
        return _longest_first(halted)
    working = [sign for sign in running if sign.activity != "waiting"]
    if working and len(working) < len(running):
        return _longest_first(working)
    newest = max((sign.step for sign in running), default=0)
    behind = [sign.rank for sign in running if sign.step < newest]
    return behind if len(behind) == 1 and len(running) > 2 else []


def stragglers(signs: Sequence[RankReport], factor: float) -> list[tuple[int, float]]:
    """Return the ranks that compute at least `factor` times as long per step as the median rank (of two ranks: as
    the faster one), each with its multiple; the slowest first."""
    busy = {sign.rank: sign.busy_seconds for sign in signs if sign.busy_seconds}
    if len(busy) < 2:
        return []
    usual = min(busy.values()) if len(busy) == 2 else median(busy.values())
    found = [(rank, seconds / usual) for rank, seconds in busy.items() if seconds >= factor * usual]
    return sorted(found, key=lambda entry: -entry[1])


def _longest_first(signs: Sequence[RankReport]) -> list[int]:
    return [sign.rank for sign in sorted(signs, key=lambda sign: -sign.seconds)]
