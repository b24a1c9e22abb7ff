"""`pseudoreal watch`."""

import time
from dataclasses import dataclass, field

import click
from pseudoreal_operator.observe.view import Pod
from pseudoreal_trainer.cli.common import CommandError, ExitStatus
from rich.console import Console
from rich.live import Live

from pseudoreal_client.cluster.connect import Connection
from pseudoreal_client.commands.options import job_argument, now, on_cluster
from pseudoreal_client.commands.telling import LOOK_SECONDS, check_success, tell_until_end
from pseudoreal_client.view.dashboard import Look, dashboard
from pseudoreal_client.view.history import History
from pseudoreal_client.view.seen import SeenJob
from pseudoreal_client.view.speakers import has_begun

_LINES = 20_000
"""Maximal number of log lines from before the first look."""
_OVERLAP_SECONDS = 10
"""Seconds of overlap between looks at a log, because clocks differ; lines read twice count once."""


@click.command()
@job_argument()
@on_cluster
def watch(connection: Connection, name: str) -> None:
    """Show the job NAME until it ends: phases, loss, ranks and their nodes, checkpoints, what remains.

    Where the output is no terminal, it is a line whenever something has changed. Exit code 1 if the job fails.
    """
    console = Console()
    if not console.is_terminal:
        tell_until_end(connection, connection.namespace, name)
        return
    watcher = _Watcher(connection, name)
    look = watcher.look()
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not look.job.is_over:
                live.update(dashboard(look, console.width, console.height), refresh=True)
                time.sleep(LOOK_SECONDS)
                look = watcher.look_again(look)
    except KeyboardInterrupt:
        pass
    console.print(dashboard(look, console.width, console.height))
    check_success(look.job)


@dataclass
class _Watcher:
    connection: Connection
    name: str
    history: History = field(default_factory=History)
    _read: dict[str, float] = field(default_factory=dict)
    """Pod name -> time (time.monotonic) of the last read of its log."""

    def look(self) -> Look:
        api = self.connection.api
        job = SeenJob(api.job(self.connection.namespace, self.name))
        executions = job.executions(api.each("Pod", job.namespace, job.selector))
        notes: list[str] = []
        for pods in executions:
            self._read_log(job, pods, notes, is_newest=pods is executions[-1])
        self.history.add_status(job.status)
        return Look(job, executions[-1] if executions else [], self.history, notes, now())

    def look_again(self, before: Look) -> Look:
        """Return the current look; while the cluster does not answer, the previous one with a note. Raises CommandError
        if the job is gone."""
        try:
            return self.look()
        except CommandError as error:
            if error.exit_code == ExitStatus.NOT_FOUND:
                raise
            return Look(before.job, before.pods, self.history, [error.message], now())

    def _read_log(self, job: SeenJob, pods: list[Pod], notes: list[str], *, is_newest: bool) -> None:
        """Add the log of the pod with rank 0 to the history; the log of an earlier execution is read once."""
        first = next((pod for pod in pods if pod.index == 0 and has_begun(pod)), None)
        if first is None or (first.name in self._read and not is_newest):
            return
        before, self._read[first.name] = self._read.get(first.name), time.monotonic()
        since = None if before is None else round(time.monotonic() - before) + _OVERLAP_SECONDS
        try:
            self.history.read(self.connection.api.log(job.namespace, first.name, tail=_LINES, since_seconds=since))
        except CommandError as error:
            notes.append(f"the curve has only what the status says: {error.message}")
