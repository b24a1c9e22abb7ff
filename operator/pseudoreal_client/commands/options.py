"""Cluster options shared with kubectl, and shell completion of job names."""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from typing import Any

import click
from pseudoreal_api.base import KIND
from pseudoreal_trainer.cli.common import ClusterOptions, CommandError, cluster_options

from pseudoreal_client.cluster.connect import connect


def with_connection(command: Callable[..., None]) -> Callable[..., None]:
    """Add the cluster options to a command; the command receives a Connection instead of the options."""

    @wraps(command)
    def connected(cluster: ClusterOptions, **arguments: Any) -> None:
        command(connect(cluster), **arguments)

    return cluster_options(connected)


def job_argument(**settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the decorator for the argument NAME, the name of a job."""
    return click.argument("name", shell_complete=names_of_jobs, **settings)


def names_of_jobs(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    given = context.params
    try:
        connection = connect(ClusterOptions(*map(given.get, ClusterOptions._fields)))
        jobs = connection.api.each(KIND, connection.namespace)
    except CommandError:
        return []  # completion must not print errors
    return [job["metadata"]["name"] for job in jobs if job["metadata"]["name"].startswith(incomplete)]


def now() -> datetime:
    return datetime.now(UTC)
