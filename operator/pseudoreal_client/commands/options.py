"""The options that all commands for a cluster have, as in kubectl, and names of jobs that the shell completes."""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from typing import Any, TypeVar

import click

from pseudoreal_client.cluster.api import JOBS
from pseudoreal_client.cluster.connect import Where, connect
from pseudoreal_client.refusal import Refusal

C = TypeVar("C", bound=Callable[..., Any])


def cluster_options(command: C) -> C:
    """Adds -n, --context and --kubeconfig."""
    for option in (
        click.option("--kubeconfig", help="File to use in place of KUBECONFIG."),
        click.option("--context", help="Context of the kubeconfig."),
        click.option("-n", "--namespace", help="Default: that of the context."),
    ):
        command = option(command)
    return command


def on_cluster(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of a cluster to a command, which gets a Connection in their place."""

    @wraps(command)
    def connected(
        *arguments: Any, namespace: str | None, context: str | None, kubeconfig: str | None, **options: Any
    ) -> None:
        command(connect(Where(namespace, context, kubeconfig)), *arguments, **options)

    return cluster_options(connected)


def job_argument(**settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The argument NAME: that of a job."""
    return click.argument("name", shell_complete=names_of_jobs, **settings)


def names_of_jobs(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    given = context.params
    try:
        connection = connect(Where(given.get("namespace"), given.get("context"), given.get("kubeconfig")))
        jobs = connection.api.each(JOBS, connection.namespace)
    except Refusal:
        # A shell that completes says nothing.
        return []
    return [job["metadata"]["name"] for job in jobs if job["metadata"]["name"].startswith(incomplete)]


def now() -> datetime:
    return datetime.now(UTC)
