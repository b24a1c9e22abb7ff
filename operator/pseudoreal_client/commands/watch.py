"""`pseudoreal watch`: a screen on a terminal; elsewhere, and for `submit --wait`, a line for each change."""

import time
from dataclasses import dataclass, field

import click
from pseudoreal.client import Client
from pseudoreal.errors import ClientError, NotFound
from pseudoreal.first_rank import FirstRankLogs
from pseudoreal.observed_job import ObservedJob
from pseudoreal_trainer.cli.common import CommandError
from rich.console import Console
from rich.live import Live

from pseudoreal_client.commands.options import job_argument, now, with_client
from pseudoreal_client.view.dashboard import Snapshot, dashboard
from pseudoreal_client.view.history import History
from pseudoreal_client.view.rows import summary_line

POLL_SECONDS = 2.0


@click.command()
@job_argument()
@with_client
def watch(client: Client, name: str) -> None:
    """Show the job NAME until it ends: phases, loss, ranks and their nodes, checkpoints, remaining time.

    If the output is not a terminal, it has one line per change. Exit code 1 if the job fails.
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
    """Lines that are read twice count once in it."""

    def __post_init__(self) -> None:
        self._logs = FirstRankLogs(self.client.api)

    def take_snapshot(self) -> Snapshot:
        job = self.client.observe(self.name)
        executions = job.executions(self.client.api.each("Pod", job.namespace, job.selector))
        notes: list[str] = []

        def warn(error: ClientError) -> None:
            notes.append(f"the curve has only what the status says: {error.message}")

        self.history.read(self._logs.read(job, executions, warn))
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
