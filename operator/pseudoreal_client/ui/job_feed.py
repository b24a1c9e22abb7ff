"""The page of a job on a cluster: what `pseudoreal describe` says, and figures from the logs of rank 0.

The history, the checkpoints and all steps are in the job's storage. This program does not read that: a job's author
chooses its URL and its endpoint, and the user's credentials would be used there as soon as the page is opened. The page
has the commands that read it.
"""

import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from pseudoreal import changes
from pseudoreal.client import Client
from pseudoreal.errors import ClientError, NoEffect, NotFound, Unreadable
from pseudoreal.first_rank import FirstRankLogs
from pseudoreal.observed_job import ObservedJob
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.resolved.resolve import UnresolvableJob, object_storage, phase_config
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_operator.observe.reading import progress_of
from pseudoreal_operator.observe.view import Pod
from pseudoreal_trainer.cli.common import ClusterOptions
from pseudoreal_trainer.report.job import Job, jobs_of
from pseudoreal_trainer.report.reading import JobFiles
from pseudoreal_trainer.report.steps import StepCollector
from pseudoreal_trainer.ui.view import Command, JobView, Table
from pydantic import ValidationError

from pseudoreal_client.view.description import (
    condition_rows,
    description,
    event_rows,
    facts,
    fault_rows,
)

Json = dict[str, Any]

POLL_SECONDS = 2.0
"""Seconds between two reads, as in `pseudoreal watch`; a change of the job is read at once."""
_EVENTS_SECONDS = 6.0
"""Least seconds between two reads of the job's events."""
_REPEATED = 256
"""Number of newest lines that are compared with new ones: a log is read with some seconds of overlap."""
_FROM_LOGS = (
    "The figures are from the logs of rank 0 in the pods that still exist: at most one step a second. They end where a"
    " node has cut a log."
)
_OF_FAULTS = "the table of the faults has the times, reasons, pods and nodes of the newest ones"


class ClusterJob:
    """Feed of one job."""

    def __init__(self, client: Client, name: str, cluster: ClusterOptions) -> None:
        self._client, self._name, self._cluster = client, name, cluster
        self._logs, self._figures = FirstRankLogs(client.api), _Figures()
        self._woken = threading.Event()
        self._closed = False
        self._events: list[Json] = []
        self._events_read = 0.0
        self._uid: str | None = None
        self._newest: JobView | None = None

    def wait(self) -> None:
        if not self._closed:
            self._woken.wait(POLL_SECONDS)
            self._woken.clear()

    def wake(self) -> None:
        """Read the job now; any thread may call it."""
        self._woken.set()

    def close(self) -> None:
        self._closed = True
        self._woken.set()

    def read(self) -> JobView | None:
        """Return the job as it is now. Once it is deleted, return the newest state of before, marked so."""
        try:
            job = self._client.observe(self._name)
        except NotFound:
            if self._newest is None:
                raise
            if self._newest.is_gone:
                return None
            self._newest = replace(self._newest, is_gone=True, state="Deleted", commands=())
            return self._newest
        if (reason := job.unreadable) is not None:
            raise Unreadable(f"the status of {job.name} cannot be read: {reason}")
        if self._uid not in (None, job.uid):
            # Another job of the same name: nothing of the one before is its own.
            self._logs, self._figures, self._events_read = FirstRankLogs(self._client.api), _Figures(), 0.0
        self._uid = job.uid
        self._newest = self._view(job)
        return self._newest

    def _view(self, job: ObservedJob) -> JobView:
        notices: list[str] = []
        executions = self._executions(job, notices)
        self._read_events(job, notices)
        self._figures.read(self._logs.read(job, executions, lambda error: notices.append(_without("Figures", error))))
        now = datetime.now(UTC)
        newest = executions[-1] if executions else []
        return JobView(
            name=job.name,
            place=f"namespace {job.namespace}",
            state=job.status.state,
            job=self._figures.job(job),
            facts=[*facts(job, now)],
            tables=_tables(job, self._events, now),
            description=description(job, newest, self._events, now),
            commands=[*_commands(job, self._cluster)],
            notices=notices,
        )

    def _executions(self, job: ObservedJob, notices: list[str]) -> Sequence[Sequence[Pod]]:
        try:
            return job.executions(self._client.api.each("Pod", job.namespace, job.selector))
        except ClientError as error:
            notices.append(_without("Pods", error))
            return []

    def _read_events(self, job: ObservedJob, notices: list[str]) -> None:
        if self._events_read and time.monotonic() - self._events_read < _EVENTS_SECONDS:
            return
        try:
            fields = f"involvedObject.uid={job.uid}"
            self._events = self._client.api.each("Event", job.namespace, fields=fields)
            self._events_read = time.monotonic()
        except ClientError as error:
            self._events = []
            notices.append(_without("Events", error))


def _without(what: str, error: ClientError) -> str:
    return f"{what} are not shown: {error.message}"


class _Figures:
    """Steps from the logs of rank 0."""

    def __init__(self) -> None:
        self._collector = StepCollector()
        self._newest: deque[int] = deque(maxlen=_REPEATED)
        """Hashes of the newest lines."""
        self._configs: tuple[int, list[PhaseConfig]] = (-1, [])
        """Generation of the spec, and the configurations of its phases."""

    def read(self, lines: Iterator[str]) -> None:
        for line in lines:
            # Most lines of a log are no progress.
            if '"progress"' not in line or hash(line) in self._newest:
                continue
            self._newest.append(hash(line))
            if (report := progress_of(line)) is not None:
                self._collector.add_report(report)

    def job(self, job: ObservedJob) -> Job:
        steps = self._collector.steps()
        where = f"the cluster: {job.name} in namespace {job.namespace}"
        files = JobFiles(
            where, steps, notices=[_FROM_LOGS, *_elsewhere(job)], configs=self._configs_of(job), has_checkpoints=False
        )
        found = jobs_of([files])[0]
        restarts = [replace(restart, cause=_OF_FAULTS) for restart in found.restarts]
        return replace(found, name=job.name, label=job.name, uid=job.uid, restarts=restarts)

    def _configs_of(self, job: ObservedJob) -> list[PhaseConfig]:
        generation = int(job.body["metadata"].get("generation") or 0)
        if self._configs[0] != generation:
            self._configs = (generation, [*_phase_configs(job)])
        return self._configs[1]


def _phase_configs(job: ObservedJob) -> Iterator[PhaseConfig]:
    """Yield the configuration of each phase that follows from the spec; none of a layout that is still to be chosen."""
    if job.spec is None:
        return
    read = PseudoRealJob.from_object(job.body)
    for index in range(len(job.spec.phases)):
        try:
            yield phase_config(read, index, execution=0, work_directory="/work", offload_directory="/offload")
        except (UnresolvableJob, ValidationError, ValueError, KeyError):
            continue


def _elsewhere(job: ObservedJob) -> Iterator[str]:
    url = _storage_of(job)
    where = f"in {url}" if url else "on the job's volume"
    yield f"All steps, the checkpoints, the history and the samples are {where}, which this page does not read."


def _storage_of(job: ObservedJob) -> str | None:
    return object_storage(PseudoRealJob.from_object(job.body)) if job.spec is not None else None


def _tables(job: ObservedJob, events: Sequence[Json], now: datetime) -> list[Table]:
    return [
        Table("Conditions", ("Type", "Status", "Reason", "Message"), condition_rows(job)),
        Table("Faults", ("Execution", "Time", "Reason", "Pod", "Node", "Then"), fault_rows(job, now)),
        Table("Events", ("Age", "Type", "Reason", "Message"), event_rows(events, now)),
    ]


def _commands(job: ObservedJob, cluster: ClusterOptions) -> Iterator[Command]:
    name, phase = shlex.quote(job.name), job.status.current_phase
    where = " ".join(["-n", shlex.quote(job.namespace), *_options(cluster)])
    yield _change(
        "Save a checkpoint and free the pods", f"pseudoreal suspend {name} {where}", lambda: changes.suspend(job)
    )
    yield _change("Let the suspended job go on", f"pseudoreal resume {name} {where}", lambda: changes.resume(job))
    yield _change(
        "End the phase in training now, through a committed checkpoint",
        f"pseudoreal finish-phase {name} {where}",
        lambda: changes.finish_phase(job, None),
    )
    if phase is not None:
        yield _change(
            f"Train phase {phase} again from its start",
            f"pseudoreal repeat-phase {name} {shlex.quote(phase)} {where}",
            lambda: changes.repeat_phase(job, phase),
        )
    yield Command(
        "Delete the job and its pods; checkpoints stay, unless the operator made their claim",
        f"kubectl delete pseudorealjob {name} {where}",
    )
    yield Command("Follow the logs of all ranks", f"pseudoreal logs {name} -f {where}")
    if url := _storage_of(job):
        yield Command(
            "Show the whole page live, from object storage: all steps, checkpoints, history (needs your credentials)",
            f"pseudoreal ui {shlex.quote(url)}",
        )


def _change(effect: str, text: str, change: Callable[[], object]) -> Command:
    try:
        change()
    except (NoEffect, NotFound) as refusal:
        return Command(effect, text, refusal.message)
    return Command(effect, text)


def _options(cluster: ClusterOptions) -> Iterator[str]:
    """Yield the options that choose the cluster, as the user gave them."""
    if cluster.context:
        yield from ("--context", shlex.quote(cluster.context))
    if cluster.kubeconfig:
        yield from ("--kubeconfig", shlex.quote(cluster.kubeconfig))
