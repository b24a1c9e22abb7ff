"""Results of the operator benchmark, its bars, and its section of the report. Pure except for reading."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from benchmarks import pages
from benchmarks.claims import Claim
from benchmarks.results import RESULTS
from tests.support.load.audit import percentile

OPERATOR = RESULTS / "operator.json"
MOST_JOBS = 5000
_MB = 1e6
_QUIET = 0.1
"""Processors that other programs may use on a quiet machine."""


class Quantiles(BaseModel, frozen=True):
    """Quantiles in seconds."""

    count: int
    p50: float
    p99: float


def quantiles(values: Iterable[float]) -> Quantiles:
    found = [*values]
    return Quantiles(count=len(found), p50=round(percentile(found, 0.5), 3), p99=round(percentile(found, 0.99), 3))


class Flight(BaseModel, frozen=True):
    """Figures from applying the jobs until all of them trained."""

    seconds: float
    processor_seconds: float


class Quiet(BaseModel, frozen=True):
    """Figures while jobs ran without changes: requests per second by verb and resource."""

    seconds: float
    for_jobs: dict[str, float]
    lease: float
    processor_share: float
    """Share of one processor."""


class StartUp(BaseModel, frozen=True):
    """Start of a standby's work after the leader was killed while jobs ran."""

    lease_seconds: float
    """Seconds until the standby held the Lease."""
    drained_seconds: float
    """Seconds until the standby had processed the initial list of all jobs."""
    processor_seconds: float
    """Processor seconds of the standby since its own start."""
    longest_gap: float
    """Longest time between two Lease renewals, in seconds."""
    lease_lost: int
    transitions: int
    """Transitions of the Lease after the standby acquired it."""

    @property
    def lease_kept(self) -> bool:
        return self.lease_lost == self.transitions == 0


class Bulk(BaseModel, frozen=True):
    """Jobs that end together: each of their pods ends as soon as it can."""

    jobs: int
    seconds: float
    processor_seconds: float
    reaction: Quantiles


class Record(BaseModel, frozen=True):
    jobs: int
    date: str
    commit: str
    release: str = "0"
    """Version of this project at the commit."""
    machine: str
    others: float
    """Processors used by unrelated programs in the same time."""
    flight: Flight
    quiet: Quiet
    start_up: StartUp
    requests_per_life: dict[str, float]
    """Requests by verb and resource, from a job's creation to its end, without the time in which the job only ran."""
    reaction: Quantiles
    """Reaction at a steady rate of ends."""
    job_controller: Quantiles
    """Seconds of the reaction until the Job controller had reported the Job's end."""
    answers: Quantiles
    """Seconds in which the API server answered the operator at that rate."""
    rate: float
    """Rate of ends: jobs per second in which the first pod ended."""
    bulk: Bulk
    peak_bytes: int
    processor_seconds: float
    """Processor seconds of both operators together over the whole course."""
    complaints: dict[str, int] | None = None
    """Number of each warning or error that the operators logged; None if not recorded."""

    @property
    def processor_seconds_per_life(self) -> float:
        return self.flight.processor_seconds / self.jobs + self.bulk.processor_seconds / self.bulk.jobs


class Records(BaseModel):
    records: list[Record] = []

    def with_record(self, record: Record) -> "Records":
        """Return the records with this one in place of an older one with the same number of jobs."""
        others = [known for known in self.records if known.jobs != record.jobs]
        return Records(records=sorted([*others, record], key=lambda known: known.jobs))


@dataclass(frozen=True)
class Bar:
    what: str
    limit: float
    unit: str
    value: Callable[[Record], float]
    at_most_jobs: bool = False
    """True if the bar applies to MOST_JOBS only; otherwise it must hold for every number of jobs."""

    def verdict(self, records: Sequence[Record]) -> str:
        """Return "reached", "not reached" or "not measured". With fewer jobs, a figure that grows with them can only
        fail."""
        wanted = [record for record in records if not self.at_most_jobs or record.jobs >= MOST_JOBS]
        bad = [record for record in records if self.value(record) > self.limit]
        if bad:
            return f"**not reached**: {self.shown(self.value(bad[-1]))} at {bad[-1].jobs:,} jobs"
        if not wanted:
            return f"not measured at {MOST_JOBS:,} jobs"
        return f"reached: {self.shown(max(self.value(record) for record in wanted))}"

    def is_reached(self, records: Sequence[Record]) -> bool:
        return self.verdict(records).startswith("reached")

    def worst(self, records: Sequence[Record]) -> str:
        return self.shown(max(map(self.value, records)))

    def shown(self, value: float) -> str:
        return f"{value:.4g} {self.unit}".rstrip()


BARS = (
    Bar(
        "total rate at which the operator sends requests about jobs to the API server while no job changes",
        0.0,
        "/s",
        lambda r: sum(r.quiet.for_jobs.values()),
    ),
    Bar("peak memory of the operator with 5,000 jobs", 250.0, "MB", lambda r: r.peak_bytes / _MB, at_most_jobs=True),
    Bar(
        "time from the SIGKILL of the leading operator until its standby has examined 5,000 running jobs",
        20.0,
        "s",
        lambda r: r.start_up.drained_seconds,
        at_most_jobs=True,
    ),
    Bar(
        "number of times that the standby lost the Lease after it had taken over",
        0.0,
        "",
        lambda r: float(not r.start_up.lease_kept),
    ),
    Bar(
        "99th percentile of the time from the end of an execution's last pod until the operator creates the next Job or"
        " reports the end of the job",
        2.0,
        "s",
        lambda r: r.reaction.p99,
    ),
    Bar(
        "99th percentile of this time for jobs that finish at the same time, at most 200",
        10.0,
        "s",
        lambda r: r.bulk.reaction.p99,
    ),
)

_FIGURES: tuple[tuple[str, Callable[[Record], str]], ...] = (
    ("requests about a job, from its creation to its end", lambda r: f"{sum(r.requests_per_life.values()):.1f}"),
    ("while nothing changes: requests a second about all jobs", lambda r: f"{sum(r.quiet.for_jobs.values()):.2f}"),
    ("… requests a second about the Lease", lambda r: f"{r.quiet.lease:.2f}"),
    ("… share of a processor", lambda r: f"{r.quiet.processor_share:.1%}"),
    ("peak memory of the operator, MB", lambda r: f"{r.peak_bytes / _MB:,.0f}"),
    (
        "processor time for a job, from its creation to its end, ms",
        lambda r: f"{1000 * r.processor_seconds_per_life:,.0f}",
    ),
    ("processor time of both operators together, s", lambda r: f"{r.processor_seconds:,.1f}"),
    ("seconds until all jobs train", lambda r: f"{r.flight.seconds:,.1f}"),
    (
        "standby: seconds from the SIGKILL of the leading operator until the standby has examined all jobs",
        lambda r: f"{r.start_up.drained_seconds:,.1f}",
    ),
    ("… processor time of the standby, s", lambda r: f"{r.start_up.processor_seconds:,.1f}"),
    ("… longest time between renewals of the Lease, s", lambda r: f"{r.start_up.longest_gap:,.1f}"),
    ("at a steady rate: jobs that finish per second", lambda r: f"{r.rate:g}"),
    ("… from the end of an execution's last pod to the reaction, p50 and p99, s", lambda r: _quantiles(r.reaction)),
    ("… part of this until the Job controller reports the end, p50 and p99, s", lambda r: _quantiles(r.job_controller)),
    ("… time of the API server's answer to a request of the operator, p50 and p99, s", lambda r: _quantiles(r.answers)),
    ("all at the same time: jobs that finish", lambda r: f"{r.bulk.jobs:,}"),
    ("… jobs that finish per second", lambda r: f"{r.bulk.jobs / r.bulk.seconds:,.1f}"),
    (
        "… from the end of an execution's last pod to the reaction, p50 and p99, s",
        lambda r: _quantiles(r.bulk.reaction),
    ),
)

_TEXT = """\
A real etcd, API server and controller manager run on one machine. The operator runs as a process on this machine, with
the rights that the chart gives it. As in a cluster, the operator holds a Lease, so that only one operator works at a
time. Every job has two phases with a delink between them, and four pods in all. There are no nodes and no containers.
Instead, a simulator of this project writes the status of each pod: first that the pod runs, and later that it has
ended, with the termination message of a successful phase. (The program kwok, which also simulates pods, was not used,
because it cannot write termination messages.) The pods send no reports to the operator. The benchmark reads the
operator's requests and their times from the API server's audit log. *Requests about jobs* are all requests of the
operator except watches and requests about the Lease. All these programs share the machine's processors. So the operator
gets only the processor time that etcd, the API server, the controller manager and the simulator leave.

A measurement has five steps:

1. The benchmark applies all jobs, and waits until all of them train.
2. For some time, all jobs train, and no job changes.
3. The benchmark starts a second operator, which waits for the Lease as a standby. Then it kills the first operator
   with SIGKILL. A standby may take the Lease 15 s after its last renewal.
4. The simulator lets some jobs finish, one after the other at a steady rate.
5. The simulator lets more jobs finish, all at the same time.

When an execution ends, the operator's *reaction* is to create the next Job of the PseudoRealJob. After the last
execution, the reaction is to write the status that reports the end of the PseudoRealJob. Figures of a job "from its
creation to its end" do not include the time in which all jobs train and no job changes. *p50* and *p99* are the 50th
and the 99th percentile.

While nothing changes, the operator reads the log of one pod a second, because the pods of this benchmark send no
reports. If pods report, the operator sends no requests. The machine was slow: with 5,000 jobs, an answer of the API
server took 0.1 s (median). On a faster machine, the 99th percentile of the reaction was 1.9 s with an earlier version.
After this measurement, the operator was changed: it evaluates the rules on several fields once for each generation of a
spec. Before, the standby evaluated them for each of the 5,000 jobs, which took most of its processor time. The
measurement was not repeated with this change."""


def claim(records: Sequence[Record]) -> Claim:
    newest = max(records, key=lambda record: record.date)
    return Claim(
        subject="Many jobs at once",
        page=pages.OPERATOR.name,
        against="",
        result=tuple(f"the {bar.what} is {bar.worst(records)}" for bar in BARS if bar.is_reached(records)),
        loses=(),
        misses=tuple(
            f"the {bar.what} is {bar.worst(records)}; the aim is at most {bar.shown(bar.limit)}"
            for bar in BARS
            if not bar.is_reached(records)
        ),
        measured=f"{newest.date}, at commit {newest.commit}, on {newest.machine}",
        release=newest.release,
    )


def read() -> Records:
    return Records.model_validate_json(OPERATOR.read_bytes()) if OPERATOR.exists() else Records()


def section(records: Sequence[Record] | None = None) -> str:
    """Return the section as Markdown, by default of the newest results."""
    found = read().records if records is None else records
    parts = ["## Many jobs", _TEXT, _table(found), _bars(found), _kinds(found), _measured(found)]
    return "\n\n".join(parts)


def _table(records: Sequence[Record]) -> str:
    head = ["jobs in flight", *(f"{record.jobs:,}" for record in records)]
    rows = [[name, *(show(record) for record in records)] for name, show in _FIGURES]
    return markdown(head, rows)


def _bars(records: Sequence[Record]) -> str:
    rows = [[bar.what, bar.shown(bar.limit), bar.verdict(records)] for bar in BARS]
    return markdown(["figure", "aim: at most", "result"], rows) + _outlook(records)


def _outlook(records: Sequence[Record]) -> str:
    """Return the extrapolation to MOST_JOBS, on the line through the two largest measured numbers of jobs."""
    if len(records) < 2 or records[-1].jobs >= MOST_JOBS:
        return ""
    ahead = MOST_JOBS
    memory = on_line([(r.jobs, r.peak_bytes / _MB) for r in records[-2:]], ahead)
    looks = on_line([(r.jobs, r.start_up.drained_seconds) for r in records[-2:]], ahead)
    return (
        f"\n\nExtrapolated along a line through the two largest numbers of jobs, {ahead:,} jobs would take"
        f" {memory:,.0f} MB, and a standby would have processed them after {looks:,.0f} s. This is no measurement."
    )


def on_line(points: Sequence[tuple[int, float]], at: int) -> float:
    (x0, y0), (x1, y1) = points
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def _kinds(records: Sequence[Record]) -> str:
    kinds = dict.fromkeys(kind for record in records for kind in record.requests_per_life)
    rows = [[kind, *(f"{record.requests_per_life.get(kind, 0.0):.2f}" for record in records)] for kind in kinds]
    head = ["requests about a job, from its creation to its end", *(f"{record.jobs:,} jobs" for record in records)]
    return markdown(head, rows)


def _measured(records: Sequence[Record]) -> str:
    lines = [
        f"- {r.jobs:,} jobs: {r.date}, commit {r.commit}, {r.machine}; other programs kept {r.others:.1f} cores busy."
        for r in records
    ]
    for r in (r for r in records if r.complaints is not None):
        said = ", ".join(f"{event} {count} times" for event, count in (r.complaints or {}).items())
        warnings = f"these warnings and errors: {said}" if said else "no warnings and no errors"
        lines.append(f"- With {r.jobs:,} jobs, the operators logged {warnings}.")
    busy = any(r.others > _QUIET for r in records)
    warning = "\n\n**The machine was not quiet**: do not quote seconds of these figures." if busy else ""
    return "Machines and dates:\n\n" + "\n".join(lines) + warning


def _quantiles(found: Quantiles) -> str:
    return f"{found.p50:.2f}, {found.p99:.2f}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))
