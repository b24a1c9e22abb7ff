"""Options and errors of the commands for a cluster, and shell completion of job names."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import wraps
from typing import Any

import click
from pseudoreal.client import Client
from pseudoreal.errors import ClientError, Forbidden, NoCluster, NotFound, NotInstalled, Rejected, Unreachable
from pseudoreal_api.base import KIND
from pseudoreal_trainer.cli.common import ClusterOptions, CommandError, ExitStatus, cluster_options

_EXIT_STATUS: dict[type[ClientError], ExitStatus] = {
    NoCluster: ExitStatus.NO_CLUSTER,
    Unreachable: ExitStatus.NO_CLUSTER,
    Forbidden: ExitStatus.FORBIDDEN,
    NotFound: ExitStatus.NOT_FOUND,
    NotInstalled: ExitStatus.NOT_INSTALLED,
    Rejected: ExitStatus.INVALID_JOB,
}
"""Class of an error and its subclasses -> exit code; all others are FAILED."""


def connect(options: ClusterOptions) -> Client:
    return Client(
        options.context,
        options.namespace,
        kubeconfig=options.kubeconfig,
        warn=lambda sentence: click.echo(sentence, err=True),
    )


def with_client(command: Callable[..., None]) -> Callable[..., None]:
    """Add the cluster options to a command; the command receives a Client instead of the options."""

    @wraps(command)
    def connected(cluster: ClusterOptions, **arguments: Any) -> None:
        with command_errors():
            command(connect(cluster), **arguments)

    return cluster_options(connected)


@contextmanager
def command_errors() -> Iterator[None]:
    """Turn a ClientError in the context into the CommandError with its exit code."""
    try:
        yield
    except ClientError as error:
        raise CommandError(error.message, exit_status(error)) from error


def exit_status(error: ClientError) -> ExitStatus:
    return next((code for kind, code in _EXIT_STATUS.items() if isinstance(error, kind)), ExitStatus.FAILED)


def job_argument(**settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the decorator for the argument NAME, the name of a job."""
    return click.argument("name", shell_complete=names_of_jobs, **settings)


def names_of_jobs(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    given = context.params
    try:
        client = connect(ClusterOptions(*map(given.get, ClusterOptions._fields)))
        jobs = client.api.each(KIND, client.namespace)
    except ClientError:
        return []  # completion must not print errors
    return [job["metadata"]["name"] for job in jobs if job["metadata"]["name"].startswith(incomplete)]


def now() -> datetime:
    return datetime.now(UTC)
