"""`pseudoreal watch`: a screen on a terminal; elsewhere, and for `submit --wait`, a line for each change."""

import time
from dataclasses import dataclass, field

import click
from pseudoreal.client import Client
from pseudoreal.errors import ClientError, NotFound
from pseudoreal.observed_job import ObservedJob
from pseudoreal.pods import has_started
from pseudoreal_operator.observe.view import Pod
from pseudoreal_trainer.cli.common import CommandError
from rich.console import Console
from rich.live import Live

from pseudoreal_client.commands.options import job_argument, now, with_client
from pseudoreal_client.view.dashboard import Snapshot, dashboard
from pseudoreal_client.view.history import History
from pseudoreal_client.view.rows import summary_line

POLL_SECONDS = 2.0
_LINES = 20_000
"""Maximum number of log lines per read."""
_OVERLAP_SECONDS = 10
"""Seconds of overlap between two reads of a log, because clocks differ; lines read twice count once."""


@click.command()
@job_argument()
@with_client
def watch(client: Client, name: str) -> None:
    """Show the job NAME until it ends: phases, loss, ranks and their nodes, checkpoints, remaining time.

    If the output is no terminal, it is one line per change. Exit code 1 if the job fails.
    """
    console = Console()
    if not console.is_terminal:
        print_until_end(client, client.namespace, name)
        return
    watcher = _Watcher(client, name)
    snapshot = watcher.take_snapshot()
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not snapshot.job.is_over:
                live.update(dashboard(snapshot, console.width, console.height), refresh=True)
                time.sleep(POLL_SECONDS)
                snapshot = watcher.update_snapshot(snapshot)
    except KeyboardInterrupt:
        pass
    console.print(dashboard(snapshot, console.width, console.height))
    raise_if_failed(snapshot.job)


@dataclass
class _Watcher:
    client: Client
    name: str
    history: History = field(default_factory=History)
    _read: dict[str, float] = field(default_factory=dict)
    """Pod name -> time (time.monotonic) of the last read of its log."""

    def take_snapshot(self) -> Snapshot:
        api = self.client.api
        job = self.client.observe(self.name)
        executions = job.executions(api.each("Pod", job.namespace, job.selector))
        notes: list[str] = []
        for pods in executions:
            self._read_log(job, pods, notes, is_newest=pods is executions[-1])
        self.history.add_status(job.status)
        return Snapshot(job, executions[-1] if executions else [], self.history, notes, now())

    def update_snapshot(self, before: Snapshot) -> Snapshot:
        """Return the current snapshot; while the cluster does not answer, the previous snapshot with a note.

        Raises NotFound if the job is gone.
        """
        try:
            return self.take_snapshot()
        except NotFound:
            raise
        except ClientError as error:
            return Snapshot(before.job, before.pods, self.history, [error.message], now())

    def _read_log(self, job: ObservedJob, pods: list[Pod], notes: list[str], *, is_newest: bool) -> None:
        """Add the log of the pod with rank 0 to the history; the log of an earlier execution is read once."""
        first = next((pod for pod in pods if pod.index == 0 and has_started(pod)), None)
        if first is None or (first.name in self._read and not is_newest):
            return
        before, self._read[first.name] = self._read.get(first.name), time.monotonic()
        since = None if before is None else round(time.monotonic() - before) + _OVERLAP_SECONDS
        try:
            self.history.read(self.client.api.log(job.namespace, first.name, tail=_LINES, since_seconds=since))
        except ClientError as error:
            notes.append(f"the curve has only what the status says: {error.message}")


def print_until_end(client: Client, namespace: str, name: str) -> None:
    """Print a line whenever the job's summary has changed. Raises CommandError if the job fails."""
    printed: str | None = None
    try:
        while True:
            job = ObservedJob(client.api.job(namespace, name))
            line = summary_line(job, now())
            if line != printed:
                click.echo(line)
            printed = line
            if job.is_over:
                break
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        raise CommandError(f"the job goes on; pseudoreal watch {name} -n {namespace} shows it") from None
    raise_if_failed(job)


def raise_if_failed(job: ObservedJob) -> None:
    """Raise CommandError if the job has failed."""
    if job.status.state == "Failed":
        raise CommandError(
            f"job {job.name} failed; pseudoreal describe {job.name} -n {job.namespace} says what to change"
        )
