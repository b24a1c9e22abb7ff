"""The section of docs/benchmarks/operator.md on the operator beside Kubeflow's, its claim, and its plot."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from pseudoreal_api.wire.reports import REPORT_SECONDS
from pseudoreal_operator.endpoint.listener import MOST_CONNECTIONS

from benchmarks import machine, pages
from benchmarks.claims import Claim
from benchmarks.operator.beside.results import BESIDE, Life, Lives, Reporting, read
from benchmarks.operator.beside.stacks import (
    CLIENT_LIMIT,
    ONE_PHASE,
    STACKS,
    TRAINER,
    TRAINING_OPERATOR,
    TWO_PHASES,
)
from benchmarks.operator.results import MOST_JOBS, Quantiles, markdown

PICTURE = Path("docs/images/operator-beside.svg")
PEERS = (TRAINING_OPERATOR.title, TRAINER.title)
MOST_WRITES = {ONE_PHASE.title: 12, TWO_PHASES.title: 20}
_MB = 1e6
_QUIET = 0.1
"""Processors that other programs may use on a quiet machine."""

_FIGURES: tuple[tuple[str, Callable[[Life], str]], ...] = (
    ("all jobs finished after, s", lambda life: f"{life.seconds:,.1f}"),
    ("jobs a second", lambda life: f"{life.jobs_per_second:.2f}"),
    ("requests for a job", lambda life: f"{sum(life.requests.values()):.1f}"),
    ("writes for a job", lambda life: f"{life.writes:.2f}"),
    ("processor of the controllers for a job, ms", lambda life: f"{1000 * life.processor_seconds / life.jobs:,.0f}"),
    (
        "… of etcd, API server and controller manager, ms",
        lambda life: f"{1000 * life.servers_seconds / life.jobs:,.0f}",
    ),
    ("peak memory of the controllers, MB", lambda life: f"{life.peak_bytes / _MB:,.0f}"),
    ("end of the last pod that decides to the job's end, p50 and p99, s", lambda life: _shown(life.reaction)),
    ("when all have finished: processor", lambda life: f"{life.idle.processor_share:.1%}"),
    ("… writes", lambda life: f"{life.idle.writes}"),
    ("… requests", lambda life: f"{life.idle.requests}"),
    ("processors that other programs took", lambda life: f"{max(0.0, life.others):.1f}"),
)
_PANELS: tuple[tuple[str, Callable[[Life], float]], ...] = (
    ("jobs a second", lambda life: life.jobs_per_second),
    ("writes for a job", lambda life: life.writes),
    ("processor for a job, ms", lambda life: 1000 * life.processor_seconds / life.jobs),
    ("peak memory, MB", lambda life: life.peak_bytes / _MB),
)

_TEXT = f"""The stacks run one after the other, each on its own API server, etcd and controller manager, without nodes:
the simulator of the section above runs the pods of all stacks in the same way, 5 s each. All jobs are applied together
and end by themselves; requests and times come from the API server's audit log. *training-operator* is Kubeflow's 1.9.2
with a PyTorchJob of a master and workers; *Trainer and JobSet* are Kubeflow's Trainer 2.0.0 with a TrainJob on its own
runtime `torch-distributed`, and the JobSet 0.8.2 that it requires: two programs, whose figures are added up. Their
webhooks are called, as in their manifests. The controller manager, the training operator and JobSet may send
{CLIENT_LIMIT} requests a second. The Trainer has no such option: 20 requests a second are built in. Ours has no limit
of requests, and makes 16 passes at a time. The controllers have their default numbers of threads.

Our one-phase job does the same work as the jobs of the other stacks. Our two-phase job runs two sets of pods and a
delink between them: it is shown beside the others, and is not a comparison. A write is a request that changes a job,
its status or its children. Events, Leases and dry runs (of each Job, when a job is first seen) are not writes, but
events and dry runs are requests. The master decides the end of a PyTorchJob; all pods decide the end of other jobs."""


_WHY = """Where the time goes: the machine's processors are the limit, and the API server uses most of their time. Ours
keeps no copy of Jobs and pods, so each of its passes over a job of one phase reads the job, its Jobs and its pods; the
other stacks read from their own memory. And a status write costs the API server more here: in a profile of the API
server with 100 jobs on a quiet machine, status writes took 31 % of its time. Half of that was for the CEL rules of the
whole object, which the API server checks each time, although only the status has changed. On a busy machine a status
write took 29 ms of the API server's processor time with all rules (median of three rounds of 30), 19 ms with the rules
on changes alone, 19 ms with the rules on values alone, 13 ms with the rules that do not look into the phases, 11 ms
without any rules, and a read 2 ms. So cheaper rules alone would not reach the bar: of the 225 ms for a job, the rules
of its four status writes take 70 ms.

The tables are from before the change by which events that repeat a known state make no pass. With 60 jobs of 2 pods,
two rounds of this version, the version before it and the training operator ran in turn, on a machine whose other
programs took 1.2 to 1.5 of its 2 processors. Requests for a job went from 29.6 and 32.6 to 22.4 and 21.4, passes from
5.8 and 6.8 to 3.5 and 3.2, writes from 7.1 to 7.0, the operator's processor time for a job from 61 and 65 ms to 51 and
54, and the servers' from 259 and 258 to 248 and 243. The training operator's processor time was 15 and 14 ms, and the
servers' 93 and 87 ms. Together this is 7 % less processor time for a job, and 2.8 to 2.9 times the training operator's:
the bar is not reached. Jobs a second cannot be compared there, because other programs left each run a different share
of the machine. The four status writes of a job are most of the rest."""


def section(results: Lives | None = None) -> str:
    """Return the section as Markdown, by default of the newest results."""
    results = results or read()
    found = results.lives
    loads = sorted({(life.workers, life.jobs) for life in found})
    parts = ["## Beside Kubeflow's operators", _TEXT, _bars(results), _WHY, pages.picture(_PICTURED, PICTURE.name)]
    parts += [_table([life for life in found if (life.workers, life.jobs) == load]) for load in loads]
    parts += [_kinds(found), *([_reports(results.reporting)] if results.reporting else []), _measured(found)]
    return "\n\n".join(parts)


def claim(results: Lives) -> Claim:
    """Return the claim on jobs of few pods. Raises ValueError without such jobs of ours."""
    many = [life for life in results.lives if life.jobs > 1]
    ours = [life for life in many if life.stack == ONE_PHASE.title]
    peers = [life for life in many if life.stack in PEERS]
    most = max(life.jobs for life in ours)
    stamp = machine.stamp_of(BESIDE)

    def of(lives: Sequence[Life], value: Callable[[Life], float]) -> str:
        return " and ".join(f"{value(life):,.0f}" for life in _in_order(lives) if life.jobs == most)

    return Claim(
        subject="Jobs beside Kubeflow's operators",
        page=pages.OPERATOR.name,
        against="Kubeflow's training operator 1.9.2; Kubeflow's Trainer 2.0.0 with JobSet 0.8.2",
        result=(
            f"with {most:,} jobs the operator takes {of(ours, lambda life: life.peak_bytes / _MB)} MB of memory,"
            f" others {of(peers, lambda life: life.peak_bytes / _MB)} MB",
        ),
        loses=tuple(
            f"{ratio:.2f} times the jobs a second of the faster peer, with {load:,} jobs"
            for load, ratio in _speeds(many)
            if ratio < 1
        ),
        measured=f"{stamp.date}, at {stamp.commit}, {machine.hardware()}",
        release=stamp.release,
    )


_PICTURED = "Jobs a second, writes and processor for a job, and peak memory of the stacks"


def _table(lives: Sequence[Life]) -> str:
    ordered = _in_order(lives)
    jobs, pods = f"{ordered[0].jobs:,} job{'s' if ordered[0].jobs > 1 else ''}", f"{ordered[0].workers:,} pods"
    rows = [[name, *(show(life) for life in ordered)] for name, show in _FIGURES]
    return markdown([f"{jobs} of {pods}", *(life.stack for life in ordered)], rows)


def _in_order(lives: Sequence[Life]) -> list[Life]:
    titles = [stack.title for stack in STACKS]
    return sorted(lives, key=lambda life: titles.index(life.stack))


def _bars(results: Lives) -> str:
    lives, reporting = results.lives, results.reporting
    rows = [["jobs a second, of those of the faster peer", "at least 1.00×", _speed(lives)]]
    rows += [
        [f"writes for a job: {title}", f"at most {most}", _writes(lives, title, most)]
        for title, most in MOST_WRITES.items()
    ]
    ours = [life for life in lives if life.stack in MOST_WRITES]
    rows += [
        ["writes when all have finished", "0", _verdict(max((life.idle.writes for life in ours), default=0), 0, "")],
        [
            f"peak memory with {MOST_JOBS:,} jobs",
            "at most 250 MB",
            _at_most_jobs(ours, lambda life: life.peak_bytes / _MB, 250, " MB"),
        ],
        [
            f"processor with {MOST_JOBS:,} finished jobs",
            "at most 1 %",
            _at_most_jobs(ours, lambda life: 100 * life.idle.processor_share, 1, " %"),
        ],
    ]
    share = _verdict(100 * _share_of_most(reporting), 50, " %") if reporting else "not measured"
    rows += [[f"processor with reports of a job of {MOST_JOBS:,} workers", "at most 50 %", share]]
    return markdown(["bar", "", ""], rows)


def _share_of_most(found: Reporting) -> float:
    """Return the share of a processor for the reports of a job of MOST_JOBS workers, extrapolated from one report."""
    return found.milliseconds / 1000 * MOST_JOBS / REPORT_SECONDS


def _reports(found: Reporting) -> str:
    return (
        f"Reports: {found.pods:,} pods of one job report every second, each over its own connection, so that they"
        f" send as many reports as more pods every {REPORT_SECONDS:g} s. The operator accepted"
        f" {found.reports_per_second:,.0f} reports a second ({found.refused:,} were refused or lost), at"
        f" {found.milliseconds:.2f} ms of a processor for each, {found.processor_share:.0%} of a core, and wrote"
        f" {found.writes_per_minute:g} times a minute; peak memory {found.peak_bytes / _MB:,.0f} MB. For {MOST_JOBS:,}"
        f" pods, {MOST_JOBS / REPORT_SECONDS:,.0f} reports a second, that is {_share_of_most(found):.0%} of a core,"
        f" computed from the cost of one report. The endpoint holds {MOST_CONNECTIONS:,} connections, and each pod"
        " keeps one: so many pods at once were not tried."
    )


def _speed(lives: Sequence[Life]) -> str:
    said = [
        f"{'reached' if ratio >= 1 else '**not reached**'}: {ratio:.2f}× at {load:,} jobs"
        for load, ratio in _speeds(lives)
    ]
    return "; ".join(said) or "not measured"


def _speeds(lives: Sequence[Life]) -> Iterator[tuple[int, float]]:
    """Yield (J, ratio) for each load of J > 1 jobs: our jobs a second, divided by the faster peer's jobs a second."""
    for load in sorted({life.jobs for life in lives if life.jobs > 1}):
        found = {life.stack: life.jobs_per_second for life in lives if life.jobs == load}
        if ONE_PHASE.title in found and (peers := [found[peer] for peer in PEERS if peer in found]):
            yield load, found[ONE_PHASE.title] / max(peers)


def _writes(lives: Sequence[Life], title: str, most: float) -> str:
    found = [life.writes for life in lives if life.stack == title and life.jobs > 1]
    return _verdict(max(found), most, "") if found else "not measured"


def _at_most_jobs(lives: Sequence[Life], value: Callable[[Life], float], most: float, unit: str) -> str:
    """Return the verdict on a figure that grows with the number of jobs: with fewer than MOST_JOBS jobs, only a failure
    can be certain."""
    worst, jobs = max(map(value, lives), default=0.0), max((life.jobs for life in lives), default=0)
    if worst <= most and jobs < MOST_JOBS:
        return f"not measured at {MOST_JOBS:,} jobs; {worst:.3g}{unit} at {jobs:,}"
    return _verdict(worst, most, unit)


def _verdict(value: float, most: float, unit: str) -> str:
    return f"{'reached' if value <= most else '**not reached**'}: {value:.4g}{unit}"


def _kinds(lives: Sequence[Life]) -> str:
    """Return the table of requests by kind, under the largest load."""
    most = max((life.jobs for life in lives), default=0)
    found = _in_order([life for life in lives if life.jobs == most])
    kinds = sorted({kind for life in found for kind in life.requests}, key=lambda kind: kind.split(" ")[1:])
    rows = [
        [kind, *(f"{life.requests[kind]:.2f}" if kind in life.requests else "" for life in found)] for kind in kinds
    ]
    return markdown([f"requests for a job, {most:,} jobs", *(life.stack for life in found)], rows)


def _measured(lives: Sequence[Life]) -> str:
    busy = any(life.others > _QUIET for life in lives)
    warning = " **Other programs ran meanwhile**: compare the columns of a table, and quote no seconds." if busy else ""
    return f"{machine.hardware()}. {machine.stamped(BESIDE)}{warning}"


def _shown(found: Quantiles) -> str:
    return f"{found.p50:.2f}, {found.p99:.2f}"


def draw(lives: Sequence[Life], path: Path = PICTURE) -> None:
    """Draw a panel for each figure, with a group of bars per number of jobs and a bar per stack."""
    # Equal numbers give an equal file.
    matplotlib.rcParams.update({"svg.hashsalt": path.name, "svg.fonttype": "none"})
    plt.switch_backend("svg")
    many = [life for life in lives if life.jobs > 1]
    loads = sorted({life.jobs for life in many})
    figure, panels = plt.subplots(1, len(_PANELS), figsize=(14, 3.5))
    for axes, (title, value) in zip(panels, _PANELS, strict=True):
        for place, stack in enumerate(STACKS):
            own = {life.jobs: value(life) for life in many if life.stack == stack.title}
            at = [loads.index(jobs) + 0.2 * (place - 1.5) for jobs in own]
            axes.bar(at, list(own.values()), width=0.18, label=stack.title)
        axes.set_title(title)
        axes.set_xticks(range(len(loads)), [f"{jobs:,} jobs" for jobs in loads])
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
