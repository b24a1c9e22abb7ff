"""The section of docs/benchmarks/operator.md on the operator beside Kubeflow's, its claim, and its plot."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from pseudoreal_api.wire.reports import REPORT_SECONDS
from pseudoreal_operator.endpoint.listener import MOST_CONNECTIONS

from benchmarks import machine, pages
from benchmarks.claims import Claim
from benchmarks.operator.beside.results import BESIDE, Life, Lives, Loss, Reporting, read
from benchmarks.operator.beside.stacks import (
    CLIENT_LIMIT,
    JOBSET,
    ONE_PHASE,
    STACKS,
    TRAINER,
    TRAINING_OPERATOR,
    TWO_PHASES,
)
from benchmarks.operator.results import MOST_JOBS, markdown

PICTURE = Path("docs/images/operator-beside.svg")
PEERS = (TRAINING_OPERATOR.title, TRAINER.title)
MOST_WRITES = {ONE_PHASE.title: 12, TWO_PHASES.title: 20}
_MB = 1e6
_QUIET = 0.1
"""Processors that other programs may use on a quiet machine."""

_FIGURES: tuple[tuple[str, Callable[[Life], str]], ...] = (
    ("seconds until all jobs have finished", lambda life: f"{life.seconds:,.1f}"),
    ("jobs a second", lambda life: f"{life.jobs_per_second:.2f}"),
    ("requests for a job", lambda life: f"{sum(life.requests.values()):.1f}"),
    ("writes for a job", lambda life: f"{life.writes:.2f}"),
    (
        "processor time of the controllers for a job, ms",
        lambda life: f"{1000 * life.processor_seconds / life.jobs:,.0f}",
    ),
    (
        "… of etcd, API server and controller manager, ms",
        lambda life: f"{1000 * life.servers_seconds / life.jobs:,.0f}",
    ),
    ("peak memory of the controllers, MB", lambda life: f"{life.peak_bytes / _MB:,.0f}"),
    (
        "from the end of the master or the last pod to the reported end of the job, p50 and p99, s",
        lambda life: f"{life.reaction.p50:.2f}, {life.reaction.p99:.2f}",
    ),
    ("after all jobs have finished: share of a processor", lambda life: f"{life.idle.processor_share:.1%}"),
    ("… writes", lambda life: f"{life.idle.writes}"),
    ("… requests", lambda life: f"{life.idle.requests}"),
    ("processors that programs outside the comparison took", lambda life: f"{max(0.0, life.others):.1f}"),
)
_PANELS: tuple[tuple[str, Callable[[Life], float]], ...] = (
    ("jobs a second", lambda life: life.jobs_per_second),
    ("writes for a job", lambda life: life.writes),
    ("processor for a job, ms", lambda life: 1000 * life.processor_seconds / life.jobs),
    ("peak memory, MB", lambda life: life.peak_bytes / _MB),
)

_TEXT = f"""\
This section compares three *stacks*: pseudoreal's operator and two operators of Kubeflow. The stacks run one after the
other, each with its own API server, etcd and controller manager. There are no nodes and no containers: a simulator of
this project writes the statuses of the pods, as if each pod ran for 5 s. The benchmark applies all jobs at the same
time, and waits until all jobs have ended. It reads the requests of the controllers, with the time of each request, from
the API server's audit log.

- *pseudoreal* has no limit of requests a second, and makes at most 16 reconcile passes at the same time. Its jobs have
  one phase, and so one set of pods, like the jobs of the other stacks. In the column *pseudoreal, two phases*, the jobs
  have two phases with a delink between them. This column is not compared with other columns, because the jobs of the
  other stacks have no phases.
- *training-operator* is Kubeflow's training operator 1.9.3. A job is a PyTorchJob with a master and workers.
- *Trainer and JobSet* is Kubeflow's Trainer 2.2.0, together with JobSet 0.11.1; the Trainer makes a JobSet for each of
  its jobs. The figures of this stack are sums over Trainer and JobSet. A job is a TrainJob with the runtime
  `torch-distributed`, which the Trainer provides.
- *minimal requests* is a program of this benchmark. For each PseudoRealJob it makes only the requests that no operator
  could leave out that lets a Job make the pods: it creates a Service and a Job, and writes two statuses. The program
  survives no fault. Its column shows how long etcd, the API server and the controller manager take for a job in any
  case.

With Kubeflow's operators, the API server calls the webhooks that their manifests define. The controller manager, the
training operator and JobSet may each send {CLIENT_LIMIT} requests a second to the API server. The Trainer has no limit:
it does not read the limit in its configuration. The controller manager, the training operator, JobSet and the Trainer
have their default numbers of threads.

A *write* is a request that changes a job, its status or its children. Events, dry runs and refused requests are counted
as requests, but not as writes. (When pseudoreal's operator first sees a PseudoRealJob, it makes a dry run of each Job
of this PseudoRealJob.) Requests about Leases, and watches, are counted neither as requests nor as writes. A PyTorchJob
ends when its master ends, so the simulator lets the master end after all workers, as in a training, in which all ranks
end together. The other kinds of jobs end when the last of their pods ends."""


_LOSS = """\
**Lost pods.** One job has many pods that train. Then all of them fail at the same time, as if their nodes were gone,
and the simulator starts each new pod at once. The table has the time from the first failure until as many new pods run.
pseudoreal starts a new execution with a new Job. *JobSet, jobs recreated* is JobSet with its default strategy, which
also makes a new Job. JobSet's restart in place needs an agent in each pod, and was not tried. It leaves the replacement
of lost pods to their Job. But the Job controller waits longer after each failed pod: in a trial, a Job of 1,000 pods
that were all lost had not replaced them after 3 minutes."""


_WHY = """\
**Where the time goes.** With jobs of few pods, the machine's processors limit how many jobs finish in a second, and the
API server uses most of the processor time. The column *minimal requests* shows that pseudoreal cannot reach the aim for
jobs a second as long as Jobs make its pods: with 200 jobs, even the minimal requests finish fewer jobs in a second than
the training operator. The training operator creates the pods itself, so it needs no Job controller, which writes each
Job's status and a finalizer of each pod. [One Job makes the pods](../decisions/0039-one-job-makes-the-pods.md) of
pseudoreal for other reasons.

A job of pseudoreal takes about twice as much processor time of the servers as the minimal requests. These requests are
added: a dry run of the Job, four events, a NetworkPolicy, a Secret, one or two more statuses, and reads before
decisions (about two of the PseudoRealJob, two of its Jobs and one of its pods). The pods are also larger, because their
template has the whole configuration of the trainer.

With one job of many pods, the requests of pseudoreal are few. Most of its requests are statuses with the number of
pods that are ready: about one in 1.5 s while pods start. The training operator creates each pod and a Service for each
pod.

The columns of pseudoreal for 200 and 1,000 jobs of one phase, and the table of lost pods, were measured last. Between
them and the other figures, two changes were made in pseudoreal's operator. It evaluates the rules on several fields
once for each generation of a spec, and it stops the pods of an execution that cannot train any more sixteen at a time.
Before the second change, 57.5 s passed after the loss of 1,000 pods until 1,000 new pods ran. During the measurement,
the machine became slower: with 1,000 jobs, the training operator first took 113 s, and an hour later 136 s. With 1,000
jobs, pseudoreal and the training operator were measured one after the other, and Trainer and JobSet earlier."""


def section(results: Lives | None = None) -> str:
    """Return the section as Markdown, by default of the newest results."""
    results = results or read()
    found = results.lives
    loads = sorted({(life.workers, life.jobs) for life in found})
    parts = ["## Beside Kubeflow's operators", _TEXT, _bars(results), _WHY, pages.picture(_PICTURED, PICTURE.name)]
    parts += [_table([life for life in found if (life.workers, life.jobs) == load]) for load in loads]
    parts += [_kinds(found), *([_losses(results.losses)] if results.losses else [])]
    parts += [*([_reports(results.reporting)] if results.reporting else []), _measured(found)]
    return "\n\n".join(parts)


def claim(results: Lives) -> Claim:
    """Return the claim on jobs of few pods. Raises ValueError without such jobs of ours."""
    many = [life for life in results.lives if life.jobs > 1]
    ours = [life for life in many if life.stack == ONE_PHASE.title]
    peers = [life for life in many if life.stack in PEERS]
    most = max(life.jobs for life in ours)
    stamp = machine.stamp_of(BESIDE)

    def memory(lives: Sequence[Life], form: str) -> str:
        found = [life for life in _in_order(lives) if life.jobs == most]
        return " and ".join(form.format(f"{life.peak_bytes / _MB:,.0f}", life.stack) for life in found)

    return Claim(
        subject="Jobs beside Kubeflow's operators",
        page=pages.OPERATOR.name,
        against="Kubeflow's training operator 1.9.3; Kubeflow's Trainer 2.2.0 with JobSet 0.11.1",
        result=(
            f"with {most:,} jobs, pseudoreal's operator takes {memory(ours, '{} MB')} of memory; Kubeflow's operators"
            f" take {memory(peers, '{} MB (*{}*)')}",
        ),
        loses=tuple(
            f"with {load:,} jobs, pseudoreal finishes {ratio:.2f} times as many jobs a second as the faster of"
            " Kubeflow's operators"
            for load, ratio in _speeds(many)
            if ratio < 1
        ),
        measured=f"{stamp.date}, at commit {stamp.commit}, on {machine.hardware()}",
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
    faster = (
        "jobs that pseudoreal finishes in a second, divided by the jobs that the faster of Kubeflow's operators"
        " finishes in a second"
    )
    rows = [[faster, "at least 1.00×", _speed(lives)]]
    rows += [
        [f"writes for a job: {title}", f"at most {most}", _writes(lives, title, most)]
        for title, most in MOST_WRITES.items()
    ]
    ours = [life for life in lives if life.stack in MOST_WRITES]
    rows += [
        [
            "writes after all jobs have finished",
            "0",
            _verdict(max((life.idle.writes for life in ours), default=0), 0, ""),
        ],
        [
            f"peak memory of pseudoreal's operator with {MOST_JOBS:,} jobs",
            "at most 250 MB",
            _at_most_jobs(ours, lambda life: life.peak_bytes / _MB, 250, " MB"),
        ],
        [
            f"share of a processor that pseudoreal's operator uses with {MOST_JOBS:,} finished jobs",
            "at most 1 %",
            _at_most_jobs(ours, lambda life: 100 * life.idle.processor_share, 1, " %"),
        ],
    ]
    share = _verdict(100 * _share_of_most(reporting), 50, " %") if reporting else "not measured"
    reports = f"share of a processor that pseudoreal's operator uses for the reports of a job of {MOST_JOBS:,} workers"
    rows += [[reports, "at most 50 %", share]]
    rows += [
        [
            "seconds until one job of many pods has finished, divided by the seconds of the faster of Kubeflow's"
            " operators",
            "at most 1.00×",
            _of_one_job(lives, lambda life: life.seconds, 1.0),
        ],
        [
            "processor time of etcd, API server and controller manager for this job, divided by the time with that"
            " operator",
            "at most 1.10×",
            _of_one_job(lives, lambda life: life.servers_seconds, 1.1),
        ],
        [
            "peak memory of pseudoreal's operator with one job of many pods",
            "at most 250 MB",
            _verdict(
                max((life.peak_bytes / _MB for life in ours if life.jobs == 1), default=0.0),
                250,
                f" MB with {max((life.workers for life in ours if life.jobs == 1), default=0):,} pods",
            ),
        ],
    ]
    if results.losses:
        rows += [
            [
                "seconds from the loss of all pods of a job until as many new pods run, divided by the seconds of"
                " JobSet",
                "at most 1.50×",
                _restart(results.losses),
            ]
        ]
    return markdown(["figure", "aim", "result"], rows)


def _of_one_job(lives: Sequence[Life], figure: Callable[[Life], float], most: float) -> str:
    """Return the verdict on our figure divided by the faster peer's figure, for each number of pods of one job."""
    said = []
    for workers in sorted({life.workers for life in lives if life.jobs == 1}):
        found = {life.stack: life for life in lives if (life.jobs, life.workers) == (1, workers)}
        peers = [found[peer] for peer in PEERS if peer in found]
        if ONE_PHASE.title in found and peers:
            ratio = figure(found[ONE_PHASE.title]) / figure(min(peers, key=lambda life: life.seconds))
            reached = "reached" if ratio <= most else "**not reached**"
            said.append(f"{reached}: {ratio:.2f}× with {workers:,} pods")
    return "; ".join(said) or "not measured"


def _restart(losses: Sequence[Loss]) -> str:
    said = []
    for workers in sorted({loss.workers for loss in losses}):
        found = {loss.stack: loss.seconds for loss in losses if loss.workers == workers}
        if {ONE_PHASE.title, JOBSET.title} <= found.keys():
            ratio = found[ONE_PHASE.title] / found[JOBSET.title]
            said.append(f"{'reached' if ratio <= 1.5 else '**not reached**'}: {ratio:.2f}× with {workers:,} pods")
    return "; ".join(said) or "not measured"


def _losses(losses: Sequence[Loss]) -> str:
    rows = [
        [
            f"{loss.stack}, {loss.workers:,} pods",
            f"{loss.lost_seconds:.1f}",
            f"{loss.seconds:.1f}",
            f"{loss.requests:,}",
            f"{loss.servers_seconds:.1f}",
        ]
        for loss in losses
    ]
    head = [
        "all pods of a job are lost",
        "seconds until all were lost",
        "seconds until as many new pods ran",
        "requests of the controllers",
        "processor time of the servers, s",
    ]
    return f"{_LOSS}\n\n{markdown(head, rows)}"


def _share_of_most(found: Reporting) -> float:
    """Return the share of a processor for the reports of a job of MOST_JOBS workers, extrapolated from one report."""
    return found.milliseconds / 1000 * MOST_JOBS / REPORT_SECONDS


def _reports(found: Reporting) -> str:
    return (
        f"**Reports.** In this measurement, {found.pods:,} pods of one job send a report to the operator every second,"
        f" each over its own connection. Together they send as many reports as {found.pods * REPORT_SECONDS:,.0f} pods"
        f" that send one every {REPORT_SECONDS:g} s. The operator accepted {found.reports_per_second:,.0f} reports a"
        f" second; {found.refused:,} reports were refused or lost. The operator used {found.processor_share:.0%} of a"
        f" core, which is {found.milliseconds:.2f} ms of processor time for each report. The operator made"
        f" {found.writes_per_minute:g} writes a minute, and its peak memory was {found.peak_bytes / _MB:,.0f} MB."
        f" A job of {MOST_JOBS:,} pods sends {MOST_JOBS / REPORT_SECONDS:,.0f} reports a second. According to the"
        f" processor time for one report, these reports take {_share_of_most(found):.0%} of a core. Reports of"
        f" {MOST_JOBS:,} pods at the same time were not tried: each pod keeps a connection open, and the operator"
        f" accepts at most {MOST_CONNECTIONS:,} connections."
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
    warning = (
        " **Other programs ran at the same time.** So compare the columns of a table with each other, and do not quote"
        " seconds."
        if busy
        else ""
    )
    return f"The machine has {machine.hardware()}. {machine.stamped(BESIDE)}{warning}"


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
            at = [loads.index(jobs) + 0.16 * (place - 2) for jobs in own]
            axes.bar(at, list(own.values()), width=0.15, label=stack.title)
        axes.set_title(title)
        axes.set_xticks(range(len(loads)), [f"{jobs:,} jobs" for jobs in loads])
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
