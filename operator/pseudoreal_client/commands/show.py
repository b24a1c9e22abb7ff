"""`pseudoreal get` and `pseudoreal describe`."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import click
import yaml
from pseudoreal_api.base import API_VERSION, KIND

from pseudoreal_client.cluster.connect import Connection
from pseudoreal_client.commands.options import job_argument, now, with_connection
from pseudoreal_client.view.description import description
from pseudoreal_client.view.observed_job import ObservedJob
from pseudoreal_client.view.rows import table

Json = dict[str, Any]


@click.command()
@job_argument(required=False)
@click.option("-A", "--all-namespaces", "everywhere", is_flag=True, help="List the jobs of all namespaces.")
@click.option("-o", "--output", type=click.Choice(["wide", "yaml", "json"]), help="Default: a table.")
@with_connection
def get(connection: Connection, name: str | None, everywhere: bool, output: str | None) -> None:
    """List the jobs, or show the job NAME."""
    if name and everywhere:
        raise click.UsageError("a job of that name may be in several namespaces; name one with -n, not -A")
    bodies = _jobs(connection, name, everywhere=everywhere)
    if output in ("yaml", "json"):
        shown = bodies[0] if name else {"apiVersion": "v1", "kind": "List", "items": bodies}
        click.echo(
            json.dumps(shown, indent=2) if output == "json" else yaml.safe_dump(shown, sort_keys=False),
            nl=output == "json",
        )
    elif not bodies:
        where = "" if everywhere else f" in namespace {connection.namespace}; -A lists those of all namespaces"
        click.echo(f"there are no jobs{where}", err=True)
    else:
        for line in table([*_readable(bodies)], now(), wide=output == "wide", namespaces=everywhere):
            click.echo(line)


def _readable(bodies: Iterable[Json]) -> Iterator[ObservedJob]:
    """Yield the jobs with a status readable by this release; report the others by name."""
    for job in map(ObservedJob, bodies):
        if job.unreadable is None:
            yield job
        else:
            click.echo(f"job {job.name} in namespace {job.namespace} is left out: {job.unreadable}", err=True)


def _jobs(connection: Connection, name: str | None, *, everywhere: bool) -> list[Json]:
    if name:
        return [connection.api.job(connection.namespace, name)]
    # Items of a list lack kind and apiVersion.
    head = {"apiVersion": API_VERSION, "kind": KIND}
    return [head | body for body in connection.api.each(KIND, None if everywhere else connection.namespace)]


@click.command()
@job_argument()
@with_connection
def describe(connection: Connection, name: str) -> None:
    """Show everything about the job NAME: phases, ranks and their nodes, faults, conditions, events."""
    job = ObservedJob(connection.api.job(connection.namespace, name))
    pods = job.current_pods(connection.api.each("Pod", job.namespace, job.selector))
    events = connection.api.each("Event", job.namespace, fields=f"involvedObject.uid={job.uid}")
    for line in description(job, pods, events, now()):
        click.echo(line)
