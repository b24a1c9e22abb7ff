"""`pseudoreal logs`."""

import threading
import time
from dataclasses import dataclass, field

import click
from pseudoreal_operator.observe.view import Pod
from pseudoreal_operator.untrusted_text import sanitize
from pseudoreal_trainer.cli.common import CommandError

from pseudoreal_client.cluster.connect import Connection
from pseudoreal_client.commands.options import job_argument, with_connection
from pseudoreal_client.view.log_pods import has_started, line_prefix, not_started, pods_to_read
from pseudoreal_client.view.observed_job import ObservedJob

_POLL_SECONDS = 2.0
_MOST_CHARACTERS = 2**20
"""Maximum number of characters printed per line."""


@click.command()
@job_argument()
@click.option("--rank", type=click.IntRange(min=0), help="Only the pod with this rank, without a prefix.")
@click.option("-f", "--follow", is_flag=True, help="Follow the logs until the job ends, through all its executions.")
@click.option("-p", "--previous", is_flag=True, help="The execution before the newest, if its pods still exist.")
@click.option("--tail", type=click.IntRange(min=0), help="Number of newest lines of each pod. Default: all.")
@with_connection
def logs(connection: Connection, name: str, rank: int | None, follow: bool, previous: bool, tail: int | None) -> None:
    """Print the logs of the job NAME: all pods of its newest execution, each line with a prefix."""
    if follow and previous:
        raise click.UsageError("an execution that is over says no more; leave out --follow or --previous")
    reader = _Reader(connection, name, rank, tail)
    if follow:
        reader.follow()
    else:
        reader.print_once(previous=previous)


@dataclass
class _Reader:
    """Prints the logs of one job's pods. With `follow`, each pod has a daemon thread of its own."""

    connection: Connection
    name: str
    rank: int | None
    tail: int | None
    failures: list[CommandError] = field(default_factory=list)
    _readers: dict[str, threading.Thread] = field(default_factory=dict)
    """Pod name -> thread that reads the pod's log."""

    def print_once(self, *, previous: bool) -> None:
        job, pods = self._read_pods(previous=previous)
        for pod in pods:
            self._print(job, pod, follow=False)
        if self.failures:
            raise self.failures[0]

    def follow(self) -> None:
        """Print the logs until the job is over and its logs have ended. Raises CommandError if a log could not be
        read."""
        try:
            while True:
                over = self._start_readers()
                if over and not any(thread.is_alive() for thread in self._readers.values()):
                    break
                time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            return
        if self.failures:
            raise self.failures[0]

    def _start_readers(self) -> bool:
        """Start a thread for each started pod that has none; return whether the job is over, so that no more pods
        come."""
        job = self._job()
        try:
            _, pods = self._read_pods(previous=False, job=job)
        except CommandError:
            pods = []
        for pod in filter(has_started, pods):
            if pod.name not in self._readers:
                thread = threading.Thread(target=self._print, args=(job, pod), kwargs={"follow": True}, daemon=True)
                self._readers[pod.name] = thread
                thread.start()
        return job.is_over

    def _job(self) -> ObservedJob:
        return ObservedJob(self.connection.api.job(self.connection.namespace, self.name))

    def _read_pods(self, *, previous: bool, job: ObservedJob | None = None) -> tuple[ObservedJob, list[Pod]]:
        job = job or self._job()
        bodies = self.connection.api.each("Pod", job.namespace, job.selector)
        return job, pods_to_read(job, bodies, self.rank, previous=previous)

    def _print(self, job: ObservedJob, pod: Pod, *, follow: bool) -> None:
        if not has_started(pod):
            click.echo(not_started(pod), err=True)
            return
        head = line_prefix(job, pod) if self.rank is None else ""
        try:
            for line in self.connection.api.log(job.namespace, pod.name, follow=follow, tail=self.tail):
                # One write per line: the threads share the terminal.
                click.echo(f"{head}{sanitize(line, _MOST_CHARACTERS)}")
        except CommandError as error:
            self.failures.append(error)
            click.echo(f"{head}{error.message}", err=True)
