"""Cluster options shared with kubectl, and shell completion of job names."""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from typing import Any, TypeVar

import click
from pseudoreal_api.base import KIND

from pseudoreal_client.cluster.connect import Where, connect
from pseudoreal_client.refusal import Refusal

C = TypeVar("C", bound=Callable[..., Any])


def cluster_options(command: C) -> C:
    """Add -n, --context and --kubeconfig."""
    for option in (
        click.option("--kubeconfig", help="File to use in place of KUBECONFIG."),
        click.option("--context", help="Context of the kubeconfig."),
        click.option("-n", "--namespace", help="Default: that of the context."),
    ):
        command = option(command)
    return command


def on_cluster(command: Callable[..., None]) -> Callable[..., None]:
    """Add the cluster options to a command; the command receives a Connection instead of them."""

    @wraps(command)
    def connected(
        *arguments: Any, namespace: str | None, context: str | None, kubeconfig: str | None, **options: Any
    ) -> None:
        command(connect(Where(namespace, context, kubeconfig)), *arguments, **options)

    return cluster_options(connected)


def job_argument(**settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the decorator for the argument NAME, the name of a job."""
    return click.argument("name", shell_complete=names_of_jobs, **settings)


def names_of_jobs(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    given = context.params
    try:
        connection = connect(Where(given.get("namespace"), given.get("context"), given.get("kubeconfig")))
        jobs = connection.api.each(KIND, connection.namespace)
    except Refusal:
        # Shell completion must not print errors.
        return []
    return [job["metadata"]["name"] for job in jobs if job["metadata"]["name"].startswith(incomplete)]


def now() -> datetime:
    return datetime.now(UTC)
